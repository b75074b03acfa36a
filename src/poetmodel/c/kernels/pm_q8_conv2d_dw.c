/* The gradient of `count` weights of a quantized convolution, by results, rows, columns and channels of a group (see
   pm_q8_gradients.h, and pm_conv.h for `shape`), for the first results; `shape` has the results of a pixel of the
   gradient. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_conv2d_dw(pm_real *out, const pm_real *gradient, const int8_t *x, const int32_t *shape, int32_t batch,
                     pm_real scale_x, int32_t zero_x, int32_t count)
{
    const pm_q8_sink to = {.out = out, .scale_x = (pm_real)(float)scale_x};
    pm_q8_conv2d_dw_to(&to, gradient, x, shape, batch, zero_x, 0, count);
}
