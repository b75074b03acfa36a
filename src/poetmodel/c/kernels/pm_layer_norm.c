/* Layer norm: each of outer x rows sequences of `size` elements is normalized by its own mean and deviation; then
   weights and bias by element. mean, inverse, w and bias may be 0 (not needed, or none); out may be x. `steps`:
   strides of outer sequence, row and element, in out, then in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_layer_norm(pm_real *out, pm_real *mean, pm_real *inverse, const pm_real *x, const pm_real *w,
                   const pm_real *bias, const int32_t *steps, int32_t outer, int32_t rows, int32_t size,
                   pm_real epsilon)
{
    for (int32_t r = 0; r < outer * rows; r++) {
        pm_real *to = out + r / rows * steps[0] + r % rows * steps[1];
        const pm_real *from = x + r / rows * steps[3] + r % rows * steps[4];
        const pm_real middle = pm_mean_of(from, 1, 0, size, steps[5]);
        const pm_real scale = 1 / PM_SQRT(pm_variance_of(from, 1, 0, size, steps[5], middle) + epsilon);
        if (mean) {
            mean[r] = middle;
        }
        if (inverse) {
            inverse[r] = scale;
        }
        for (int32_t i = 0; i < size; i++) {
            *to = (*from - middle) * scale * (w ? w[i] : 1) + (bias ? bias[i] : 0);
            to += steps[2];
            from += steps[5];
        }
    }
}
