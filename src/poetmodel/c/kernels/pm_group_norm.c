/* Group norm: channels of each element of the batch in `groups` groups, each normalized by its own mean and
   deviation; then weights and bias by channel. mean, inverse, w and bias may be 0 (not needed, or none); out may be
   x. `steps`: strides of batch, channel and element, in out, then in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_group_norm(pm_real *out, pm_real *mean, pm_real *inverse, const pm_real *x, const pm_real *w,
                   const pm_real *bias, const int32_t *steps, int32_t batch, int32_t channels, int32_t plane,
                   int32_t groups, pm_real epsilon)
{
    const int32_t each = channels / groups;
    for (int32_t g = 0; g < batch * groups; g++) {
        const int32_t n = g / groups, first = g % groups * each;
        const pm_real *from = x + n * steps[3] + first * steps[4];
        const pm_real middle = pm_mean_of(from, each, steps[4], plane, steps[5]);
        const pm_real scale =
            1 / PM_SQRT(pm_variance_of(from, each, steps[4], plane, steps[5], middle) + epsilon);
        if (mean) {
            mean[g] = middle;
        }
        if (inverse) {
            inverse[g] = scale;
        }
        for (int32_t c = 0; c < each; c++) {
            const pm_real weight = w ? w[first + c] : 1, start = bias ? bias[first + c] : 0;
            pm_real *to = out + n * steps[0] + (first + c) * steps[1];
            const pm_real *p = from + c * steps[4];
            for (int32_t i = plane; i > 0; i--) {
                *to = (*p - middle) * scale * weight + start;
                to += steps[2];
                p += steps[5];
            }
        }
    }
}
