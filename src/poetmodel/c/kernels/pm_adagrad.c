/* A step of Adagrad; `steps` is the number of earlier steps, which pm_add_one increments afterwards */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_adagrad(pm_real *w, pm_real *total, const pm_real *gradient, const pm_real *steps, int32_t n, pm_real lr,
                pm_real sign, pm_real decay, pm_real lr_decay, pm_real eps)
{
    const pm_real rate = lr / (PM_C(1.0) + *steps * lr_decay);
    for (int32_t i = 0; i < n; i++) {
        const pm_real g = sign * gradient[i] + decay * w[i];
        total[i] += g * g;
        w[i] -= rate * g / (PM_SQRT(total[i]) + eps);
    }
}
