/* out = sums of the weighted cross entropy of probabilities x and targets y, over a divisor

   Logarithms are at least -100. outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_binary_cross_entropy(pm_real *out, const pm_real *x, const pm_real *y, const pm_real *weight,
                             const int32_t *outer, const int32_t *inner, pm_real divisor)
{
    PM_EACH_4(outer, i, j, k, l) {
        pm_total total = {0, 0};
        PM_EACH_3(inner, n, o, p) {
            const pm_real v = x[j + n];
            const pm_real w = y[k + o];
            const pm_real one = PM_LOG(v);
            const pm_real none = PM_LOG1P(-v);
            const pm_real part = (w - PM_C(1.0)) * PM_MAX(none, PM_C(-100.0)) - w * PM_MAX(one, PM_C(-100.0));
            pm_add_to(&total, weight[l + p] * part);
        }
        out[i] = total.sum / divisor;
    }
}
