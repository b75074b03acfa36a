/* A step of Adamax; `steps` is the number of earlier steps, which pm_add_one increments afterwards;
   other arguments as in pm_adam_body.h */
#include "pm_lerp.h"
#include "pm_kernels.h"

void pm_adamax(pm_real *w, pm_real *mean, pm_real *largest, const pm_real *gradient, const pm_real *steps, int32_t n,
               pm_real lr, pm_real sign, pm_real decay, pm_real fresh_mean, pm_real beta_largest, pm_real log_mean,
               pm_real eps)
{
    const pm_real step_size = lr / -PM_EXPM1((*steps + PM_C(1.0)) * log_mean);
    for (int32_t i = 0; i < n; i++) {
        const pm_real g = sign * gradient[i] + decay * w[i];
        mean[i] = pm_between(mean[i], g, fresh_mean);
        const pm_real before = largest[i] * beta_largest;
        const pm_real size = PM_FABS(g) + eps;
        largest[i] = PM_MAX(before, size);
        w[i] -= step_size * mean[i] / largest[i];
    }
}
