/* A step of Adam (decay) or AdamW (shrink); `steps` is the number of earlier steps, which pm_add_one increments */
#include "pm_adam_body.h"
#include "pm_kernels.h"

void pm_adam(pm_real *w, pm_real *mean, pm_real *square, const pm_real *gradient, const pm_real *steps, int32_t n,
             pm_real lr, pm_real sign, pm_real decay, pm_real shrink, pm_real fresh_mean, pm_real beta_square,
             pm_real fresh_square, pm_real log_mean, pm_real log_square, pm_real eps)
{
    pm_adam_steps(w, mean, square, 0, gradient, *steps + PM_C(1.0), n, lr, sign, decay, shrink, fresh_mean,
                  beta_square, fresh_square, log_mean, log_square, eps);
}
