/* The gradient of the weights of a quantized convolution, by results, rows, columns and channels of a group, fused
   with their update: as pm_q8_conv2d_dw and pm_q8_sgd. The gradient is not stored. The weights are `count` of all,
   from `first` on, and pointers are to these: calls may be for ranges. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_conv2d_dw_sgd(int8_t *w, int8_t *residual, const pm_real *gradient, const int8_t *x, const pm_real *scale,
                         const int32_t *shape, int32_t batch, pm_real scale_x, int32_t zero_x, int32_t first,
                         int32_t count, pm_real lr, pm_real sign, pm_real decay)
{
    const pm_q8_sink to = pm_q8_into(w, residual, scale, scale_x, lr, sign, decay);
    pm_q8_conv2d_dw_to(&to, gradient, x, shape, batch, zero_x, first, count);
}
