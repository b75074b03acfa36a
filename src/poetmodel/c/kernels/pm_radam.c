/* A step of RAdam; `steps` is the number of earlier steps, which pm_add_one increments afterwards

   The length of the average of squares is most - 2 t beta^t / (1 - beta^t), a small difference of large numbers.
   With y = -t log(beta), it is least + scale (1 - y / expm1(y)), where least = most - scale and scale = -2 /
   log(beta). Up to a length of `enough`, a step is that of momentum, and squares are only averaged. */
#include "pm_lerp.h"
#include "pm_kernels.h"

static pm_real pm_radam_share(pm_real y)
{
    const pm_real s = y * y;
    if (y >= PM_C(0.25)) {
        return PM_C(1.0) - y / PM_EXPM1(y);
    }
    pm_real sum = PM_C(1.0) / PM_C(30240.0) - s / PM_C(1209600.0);
    sum = PM_C(1.0) / PM_C(12.0) - s * (PM_C(1.0) / PM_C(720.0) - s * sum);
    return y / PM_C(2.0) - s * sum;
}

void pm_radam(pm_real *w, pm_real *mean, pm_real *square, const pm_real *gradient, const pm_real *steps, int32_t n,
              pm_real lr, pm_real sign, pm_real decay, pm_real shrink, pm_real fresh_mean, pm_real beta_square,
              pm_real fresh_square, pm_real log_mean, pm_real log_square, pm_real eps, pm_real most, pm_real scale,
              pm_real least, pm_real enough)
{
    const pm_real now = *steps + PM_C(1.0);
    const pm_real length = least + scale * pm_radam_share(-now * log_square);
    const pm_real kept = PM_C(1.0) - lr * shrink;
    const int squares = length > enough;
    pm_real rate = lr / -PM_EXPM1(now * log_mean);
    if (squares) {
        const pm_real correction = -PM_EXPM1(now * log_square);
        const pm_real part = (length - PM_C(4.0)) * (length - PM_C(2.0)) / ((most - PM_C(4.0)) * (most - PM_C(2.0)));
        rate *= PM_SQRT(correction * part * (most / length));
    }
    for (int32_t i = 0; i < n; i++) {
        const pm_real old = w[i] * kept;
        const pm_real g = sign * gradient[i] + decay * old;
        mean[i] = pm_between(mean[i], g, fresh_mean);
        square[i] = square[i] * beta_square + fresh_square * g * g;
        w[i] = old - rate * mean[i] / (squares ? PM_SQRT(square[i]) + eps : PM_C(1.0));
    }
}
