/* A step of Adam or AdamW, with or without the largest squares (AMSGrad)

   `sign` is -1 to maximize, otherwise 1; `decay` is the weight decay of Adam, `shrink` that of AdamW; `fresh_...` is 1
   minus a beta, `log_...` the logarithm of one. Powers of betas lose no digits in float: 1 - beta^step =
   -expm1(step log(beta)). */
#ifndef PM_ADAM_BODY_H
#define PM_ADAM_BODY_H

#include "pm_lerp.h"

static inline void pm_adam_steps(pm_real *w, pm_real *mean, pm_real *square, pm_real *largest, const pm_real *gradient,
                                 pm_real steps, int32_t n, pm_real lr, pm_real sign, pm_real decay, pm_real shrink,
                                 pm_real fresh_mean, pm_real beta_square, pm_real fresh_square, pm_real log_mean,
                                 pm_real log_square, pm_real eps)
{
    const pm_real step_size = lr / -PM_EXPM1(steps * log_mean);
    const pm_real root = PM_SQRT(-PM_EXPM1(steps * log_square));
    const pm_real kept = PM_C(1.0) - lr * shrink;
    for (int32_t i = 0; i < n; i++) {
        const pm_real old = w[i] * kept;
        const pm_real g = sign * gradient[i] + decay * old;
        mean[i] = pm_between(mean[i], g, fresh_mean);
        square[i] = square[i] * beta_square + fresh_square * g * g;
        pm_real most = square[i];
        if (largest) {
            most = PM_MAX(largest[i], most);
            largest[i] = most;
        }
        w[i] = old - step_size * mean[i] / (PM_SQRT(most) / root + eps);
    }
}

#endif
