/* out = sums of integers; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_sum_int(int32_t *out, const int32_t *x, const int32_t *outer, const int32_t *inner)
{
    PM_EACH_2(outer, i, j) {
        int32_t total = 0;
        PM_EACH_1(inner, k) {
            total += x[j + k];
        }
        out[i] = total;
    }
}
