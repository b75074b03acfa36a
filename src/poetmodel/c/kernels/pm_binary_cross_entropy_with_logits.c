/* out = sums of the weighted cross entropy of logits x and targets y, over a divisor

   An element is weight ((1 - y) x + (1 + (positive - 1) y) log(1 + exp(-x))). outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_binary_cross_entropy_with_logits(pm_real *out, const pm_real *x, const pm_real *y, const pm_real *weight,
                                         const pm_real *positive, const int32_t *outer, const int32_t *inner,
                                         pm_real divisor)
{
    PM_EACH_5(outer, i, j, k, l, m) {
        pm_total total = {0, 0};
        PM_EACH_4(inner, n, o, p, q) {
            const pm_real v = x[j + n];
            const pm_real w = y[k + o];
            const pm_real soft = PM_LOG1P(PM_EXP(-PM_FABS(v))) + (v < 0 ? -v : PM_C(0.0));
            const pm_real part = (PM_C(1.0) - w) * v + (PM_C(1.0) + (positive[m + q] - PM_C(1.0)) * w) * soft;
            pm_add_to(&total, weight[l + p] * part);
        }
        out[i] = total.sum / divisor;
    }
}
