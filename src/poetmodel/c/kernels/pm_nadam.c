/* A step of NAdam; steps and the product of momenta are those before this step; pm_nadam_count updates them
   afterwards */
#include "pm_lerp.h"
#include "pm_nadam.h"
#include "pm_kernels.h"

void pm_nadam(pm_real *w, pm_real *mean, pm_real *square, const pm_real *gradient, const pm_real *steps,
              const pm_real *product, int32_t n, pm_real lr, pm_real sign, pm_real decay, pm_real shrink, pm_real beta,
              pm_real log_decay, pm_real fresh_mean, pm_real beta_square, pm_real fresh_square, pm_real log_square,
              pm_real eps)
{
    const pm_real now = *steps + PM_C(1.0);
    const pm_real momentum = pm_nadam_momentum(now, beta, log_decay);
    const pm_real next = pm_nadam_momentum(now + PM_C(1.0), beta, log_decay);
    const pm_real so_far = *product * momentum;
    const pm_real by_gradient = lr * (PM_C(1.0) - momentum) / (PM_C(1.0) - so_far);
    const pm_real by_mean = lr * next / (PM_C(1.0) - so_far * next);
    const pm_real correction = -PM_EXPM1(now * log_square);
    const pm_real kept = PM_C(1.0) - lr * shrink;
    for (int32_t i = 0; i < n; i++) {
        const pm_real old = w[i] * kept;
        const pm_real g = sign * gradient[i] + decay * old;
        mean[i] = pm_between(mean[i], g, fresh_mean);
        square[i] = square[i] * beta_square + fresh_square * g * g;
        const pm_real size = PM_SQRT(square[i] / correction) + eps;
        w[i] = old - by_gradient * g / size - by_mean * mean[i] / size;
    }
}
