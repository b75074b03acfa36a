/* Stochastic gradient descent: w -= lr (sign gradient + decay w) */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_sgd(pm_real *w, const pm_real *gradient, int32_t n, pm_real lr, pm_real sign, pm_real decay)
{
    for (int32_t i = 0; i < n; i++) {
        w[i] -= lr * (sign * gradient[i] + decay * w[i]);
    }
}
