/* out = sums of the smooth absolute values of x - y over a divisor; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_smooth_l1_loss(pm_real *out, const pm_real *x, const pm_real *y, const int32_t *outer, const int32_t *inner,
                       pm_real beta, pm_real divisor)
{
    PM_EACH_3(outer, i, j, k) {
        pm_total total = {0, 0};
        PM_EACH_2(inner, l, m) {
            const pm_real v = x[j + l];
            const pm_real w = y[k + m];
            const pm_real d = PM_FABS(v - w);
            pm_add_to(&total, d < beta ? PM_C(0.5) * d * d / beta : d - PM_C(0.5) * beta);
        }
        out[i] = total.sum / divisor;
    }
}
