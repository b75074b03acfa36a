/* out = Euclidean norms of elements of x; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_norm(pm_real *out, const pm_real *x, const int32_t *outer, const int32_t *inner)
{
    PM_EACH_2(outer, i, j) {
        pm_total total = {0, 0};
        PM_EACH_1(inner, k) {
            pm_add_to(&total, x[j + k] * x[j + k]);
        }
        out[i] = PM_SQRT(total.sum);
    }
}
