/* The gradient of group norm's input. w may be 0 (none); dx may be dy or x. `steps`: strides of batch, channel and
   element, in dx, in dy, in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_group_norm_dx(pm_real *dx, const pm_real *dy, const pm_real *x, const pm_real *w, const pm_real *mean,
                      const pm_real *inverse, const int32_t *steps, int32_t batch, int32_t channels, int32_t plane,
                      int32_t groups)
{
    const int32_t each = channels / groups;
    const pm_real size = (pm_real)(each * plane);
    for (int32_t g = 0; g < batch * groups; g++) {
        const int32_t n = g / groups, first = g % groups * each;
        const pm_real middle = mean[g], scale = inverse[g];
        pm_total plain = {0, 0}, moment = {0, 0};
        for (int32_t c = first; c < first + each; c++) {
            pm_total own_plain = {0, 0}, own_moment = {0, 0};
            pm_add_gradients(&own_plain, &own_moment, dy + n * steps[3] + c * steps[4], steps[5],
                             x + n * steps[6] + c * steps[7], steps[8], plane, middle);
            pm_add_to(&plain, own_plain.sum * (w ? w[c] : 1));
            pm_add_to(&moment, own_moment.sum * (w ? w[c] : 1));
        }
        const pm_real level = plain.sum / size, slope = moment.sum / size * scale * scale;
        for (int32_t c = first; c < first + each; c++) {
            const pm_real weight = w ? w[c] : 1;
            pm_real *to = dx + n * steps[0] + c * steps[1];
            const pm_real *q = dy + n * steps[3] + c * steps[4], *p = x + n * steps[6] + c * steps[7];
            for (int32_t i = plane; i > 0; i--) {
                *to = (*q * weight - level - (*p - middle) * slope) * scale;
                to += steps[2];
                q += steps[5];
                p += steps[8];
            }
        }
    }
}
