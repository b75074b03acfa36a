/* out = sums of (x - y)^2 over a divisor; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_mse_loss(pm_real *out, const pm_real *x, const pm_real *y, const int32_t *outer, const int32_t *inner,
                 pm_real divisor)
{
    PM_EACH_3(outer, i, j, k) {
        pm_total total = {0, 0};
        PM_EACH_2(inner, l, m) {
            const pm_real v = x[j + l];
            const pm_real w = y[k + m];
            pm_add_to(&total, (v - w) * (v - w));
        }
        out[i] = total.sum / divisor;
    }
}
