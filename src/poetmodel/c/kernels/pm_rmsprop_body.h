/* A step of RMSprop, with momentum if `buffer` is not 0, and with squares centered by means of gradients if `mean` is
   not 0. `sign` is -1 to maximize, otherwise 1; `fresh` is 1 - alpha. */
#ifndef PM_RMSPROP_BODY_H
#define PM_RMSPROP_BODY_H

#include "pm_lerp.h"

static inline void pm_rmsprop_step(pm_real *w, pm_real *square, pm_real *buffer, pm_real *mean, const pm_real *gradient,
                                   int32_t n, pm_real lr, pm_real sign, pm_real decay, pm_real alpha, pm_real fresh,
                                   pm_real momentum, pm_real eps)
{
    for (int32_t i = 0; i < n; i++) {
        const pm_real g = sign * gradient[i] + decay * w[i];
        square[i] = square[i] * alpha + fresh * g * g;
        pm_real spread = square[i];
        if (mean) {
            mean[i] = pm_between(mean[i], g, fresh);
            spread -= mean[i] * mean[i];
        }
        const pm_real size = PM_SQRT(spread) + eps;
        if (buffer) {
            buffer[i] = buffer[i] * momentum + g / size;
            w[i] -= lr * buffer[i];
        } else {
            w[i] -= lr * g / size;
        }
    }
}

#endif
