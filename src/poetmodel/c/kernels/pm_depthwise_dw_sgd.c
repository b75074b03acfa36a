/* The gradient of the weights of a depthwise convolution, fused with their update; arguments as for
   pm_conv2d_dw_sgd. */
#include "pm_depthwise_dw.h"
#include "pm_kernels.h"

void pm_depthwise_dw_sgd(pm_real *w, const pm_real *x, const pm_real *dy, const int32_t *shape, int32_t batch,
                         int32_t first, int32_t count, int32_t dy_step, int32_t x_step, pm_real lr, pm_real sign,
                         pm_real decay)
{
    const pm_update update = {lr, sign, decay, sign == PM_C(1.0) && decay == PM_C(0.0)};
    pm_depthwise_dw_all(w, x, dy, shape, batch, first, count, dy_step, x_step, &update);
}
