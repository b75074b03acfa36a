/* The gradient of layer norm's input. w may be 0 (none); dx may be dy or x. `steps`: strides of outer sequence, row
   and element, in dx, in dy, in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_layer_norm_dx(pm_real *dx, const pm_real *dy, const pm_real *x, const pm_real *w, const pm_real *mean,
                      const pm_real *inverse, const int32_t *steps, int32_t outer, int32_t rows, int32_t size)
{
    for (int32_t r = 0; r < outer * rows; r++) {
        pm_real *to = dx + r / rows * steps[0] + r % rows * steps[1];
        const pm_real *back = dy + r / rows * steps[3] + r % rows * steps[4];
        const pm_real *from = x + r / rows * steps[6] + r % rows * steps[7];
        const pm_real middle = mean[r], scale = inverse[r];
        pm_total plain = {0, 0}, moment = {0, 0};
        for (int32_t i = 0; i < size; i++) {
            const pm_real g = back[i * steps[5]] * (w ? w[i] : 1);
            pm_add_to(&plain, g);
            pm_add_to(&moment, g * (from[i * steps[8]] - middle));
        }
        const pm_real level = plain.sum / (pm_real)size, slope = moment.sum / (pm_real)size * scale * scale;
        for (int32_t i = 0; i < size; i++) {
            const pm_real g = back[i * steps[5]] * (w ? w[i] : 1);
            to[i * steps[2]] = (g - level - (from[i * steps[8]] - middle) * slope) * scale;
        }
    }
}
