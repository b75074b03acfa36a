/* out = products of elements of x; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_prod(pm_real *out, const pm_real *x, const int32_t *outer, const int32_t *inner)
{
    PM_EACH_2(outer, i, j) {
        pm_real product = PM_C(1.0);
        PM_EACH_1(inner, k) {
            product *= x[j + k];
        }
        out[i] = product;
    }
}
