/* Batch norm with fixed statistics, from training. w and bias may be 0 (none); out may be x. `steps`: strides of
   batch, channel and element, in out, then in x. */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_batch_norm_fixed(pm_real *out, const pm_real *x, const pm_real *w, const pm_real *bias, const pm_real *mean,
                         const pm_real *variance, const int32_t *steps, int32_t batch, int32_t channels, int32_t plane,
                         pm_real epsilon)
{
    for (int32_t c = 0; c < channels; c++) {
        const pm_real scale = 1 / PM_SQRT(variance[c] + epsilon) * (w ? w[c] : 1);
        const pm_real start = bias ? bias[c] : 0, middle = mean[c];
        for (int32_t i = 0; i < batch; i++) {
            pm_real *to = out + c * steps[1] + i * steps[0];
            const pm_real *p = x + c * steps[4] + i * steps[3];
            for (int32_t j = plane; j > 0; j--) {
                *to = (*p - middle) * scale + start;
                to += steps[2];
                p += steps[5];
            }
        }
    }
}
