/* out = sums of x, each over a divisor; outer and inner: see pm_each.h */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_sum(pm_real *out, const pm_real *x, const int32_t *outer, const int32_t *inner, pm_real divisor)
{
    PM_EACH_2(outer, i, j) {
        pm_total total = {0, 0};
        PM_EACH_1(inner, k) {
            pm_add_to(&total, x[j + k]);
        }
        out[i] = total.sum / divisor;
    }
}
