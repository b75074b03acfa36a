/* The gradient of a convolution's weights, for the output channels first .. first + count - 1 (see pm_conv.h).
   dy_step is the batch stride of dy. */
#include "pm_conv2d_dw.h"
#include "pm_kernels.h"

void pm_conv2d_dw(pm_real *dw, const pm_real *x, const pm_real *dy, const int32_t *shape, int32_t batch, int32_t first,
                  int32_t count, int32_t dy_step)
{
    pm_dw_all(dw, x, dy, shape, batch, first, count, dy_step, shape[PM_IN] * shape[PM_IN_H] * shape[PM_IN_W], 0);
}
