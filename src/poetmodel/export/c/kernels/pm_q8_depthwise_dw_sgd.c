/* The gradient of the weights of a quantized depthwise convolution, by rows, columns and channels, and their update in
one: as by pm_q8_depthwise_dw and pm_q8_sgd, without a gradient in memory. The weights are `count` of all, from
`first` on, and so are pointers to them: kernels may be called for parts. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_depthwise_dw_sgd(int8_t *w, int8_t *residual, const pm_real *gradient, const int8_t *x, const pm_real *scale,
                            const int32_t *shape, int32_t batch, pm_real scale_x, int32_t zero_x, int32_t first,
                            int32_t count, pm_real lr, pm_real sign, pm_real decay)
{
    const pm_q8_sink to = pm_q8_into(w, residual, scale, scale_x, lr, sign, decay);
    pm_q8_depthwise_dw_to(&to, gradient, x, shape, batch, zero_x, first, count);
}
