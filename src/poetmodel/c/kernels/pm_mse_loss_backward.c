/* Gradient of pm_mse_loss, times a factor */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_mse_loss_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const pm_real *y,
                          const int32_t *shape, pm_real factor)
{
    PM_EACH_4(shape, i, j, k, l) {
        const pm_real v = x[k];
        const pm_real w = y[l];
        out[i] = PM_C(2.0) * factor * (v - w) * gradient[j];
    }
}
