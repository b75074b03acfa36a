/* As pm_rmsprop, with momentum */
#include "pm_rmsprop_body.h"
#include "pm_kernels.h"

void pm_rmsprop_momentum(pm_real *w, pm_real *square, pm_real *buffer, const pm_real *gradient, int32_t n, pm_real lr,
                         pm_real sign, pm_real decay, pm_real alpha, pm_real fresh, pm_real momentum, pm_real eps)
{
    pm_rmsprop_step(w, square, buffer, 0, gradient, n, lr, sign, decay, alpha, fresh, momentum, eps);
}
