/* As pm_rmsprop, with the variance of gradients */
#include "pm_rmsprop_body.h"
#include "pm_kernels.h"

void pm_rmsprop_centered(pm_real *w, pm_real *square, pm_real *mean, const pm_real *gradient, int32_t n, pm_real lr,
                         pm_real sign, pm_real decay, pm_real alpha, pm_real fresh, pm_real eps)
{
    pm_rmsprop_step(w, square, 0, mean, gradient, n, lr, sign, decay, alpha, fresh, PM_C(0.0), eps);
}
