/* The gradient of the weights of a depthwise convolution; arguments as for pm_conv2d_dw. */
#include "pm_depthwise_dw.h"
#include "pm_kernels.h"

void pm_depthwise_dw(pm_real *dw, const pm_real *x, const pm_real *dy, const int32_t *shape, int32_t batch,
                     int32_t first, int32_t count, int32_t dy_step)
{
    pm_depthwise_dw_all(dw, x, dy, shape, batch, first, count, dy_step,
                        shape[PM_IN] * shape[PM_IN_H] * shape[PM_IN_W], 0);
}
