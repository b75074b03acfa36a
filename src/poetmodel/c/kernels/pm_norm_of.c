/* out = norms of elements of x, of order 1, infinity, or any above 0; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_norm_of(pm_real *out, const pm_real *x, const int32_t *outer, const int32_t *inner, pm_real order)
{
    const int is_most = order > PM_LARGEST;
    const int is_sum = order == PM_C(1.0);
    PM_EACH_2(outer, i, j) {
        pm_total total = {0, 0};
        PM_EACH_1(inner, k) {
            const pm_real size = PM_FABS(x[j + k]);
            if (is_most) {
                total.sum = size > total.sum || size != size ? size : total.sum;
            } else {
                pm_add_to(&total, is_sum ? size : PM_POW(size, order));
            }
        }
        out[i] = is_most || is_sum ? total.sum : PM_POW(total.sum, PM_C(1.0) / order);
    }
}
