/* The gradient of the weights of a quantized convolution, by results, rows, columns and channels of a group, fused
   with their update: as pm_q8_conv2d_dw and pm_q8_stochastic. The gradient is not stored. The weights are `count` of
   all, from `first` on, and pointers are to these: calls may be for ranges. `before` is the number of earlier
   weights of the layer: tiles use separate random numbers. */
#define PM_Q8_STOCHASTIC
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_conv2d_dw_stochastic(int8_t *w, const pm_real *gradient, const int8_t *x, const pm_real *scale,
                                const int32_t *shape, int32_t batch, pm_real scale_x, int32_t zero_x, int32_t first,
                                int32_t count, int32_t site, int32_t seed, int32_t begun, int32_t steps, int32_t before, pm_real lr,
                                pm_real sign, pm_real decay)
{
    pm_q8_draws draws = pm_q8_draws_of(site, seed, begun, steps, before + first);
    const pm_q8_sink to = pm_q8_into(w, &draws, scale, scale_x, lr, sign, decay);
    pm_q8_conv2d_dw_to(&to, gradient, x, shape, batch, zero_x, first, count);
}
