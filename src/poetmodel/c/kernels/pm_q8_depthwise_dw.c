/* The gradient of the weights of `count` channels of a quantized depthwise convolution, by rows, columns and
   channels (see pm_q8_gradients.h, and pm_conv.h for `shape`, whose channels are those of a pixel of x, and of the
   gradient; its last number is the number of channels of out if it differs from `count`). */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_depthwise_dw(pm_real *out, const pm_real *gradient, const int8_t *x, const int32_t *shape, int32_t batch,
                        pm_real scale_x, int32_t zero_x, int32_t count)
{
    const pm_q8_sink to = {.out = out, .scale_x = (pm_real)(float)scale_x};
    const int32_t channels = shape[PM_FILTER] ? shape[PM_FILTER] : count;
    for (int32_t tap = 0; tap < shape[PM_WINDOW_H] * shape[PM_WINDOW_W]; tap++) {
        pm_q8_depthwise_dw_tap(&to, gradient, x, shape, batch, zero_x, tap, 0, count, tap * channels);
    }
}
