/* The gradient of `count` weights of a quantized layer of pixels, by results and channels (see pm_q8_gradients.h),
   for the first results; a pixel of the gradient has `results`. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_pointwise_dw(pm_real *out, const pm_real *gradient, const int8_t *x, int32_t pixels, int32_t in,
                        int32_t results, pm_real scale_x, int32_t zero_x, int32_t count)
{
    const pm_q8_sink to = {.out = out, .scale_x = (pm_real)(float)scale_x};
    pm_q8_pointwise_dw_to(&to, gradient, x, pixels, in, results, zero_x, 0, count);
}
