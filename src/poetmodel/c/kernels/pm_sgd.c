/* Stochastic gradient descent: w -= lr (sign gradient + decay w) */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_sgd(pm_real *w, const pm_real *gradient, int32_t n, pm_real lr, pm_real sign, pm_real decay)
{
    int32_t i = 0;
    if (sign == PM_C(1.0) && decay == PM_C(0.0)) {
        for (; i + 4 <= n; i += 4) {
            const pm_real g0 = gradient[i], g1 = gradient[i + 1], g2 = gradient[i + 2], g3 = gradient[i + 3];
            const pm_real w0 = w[i], w1 = w[i + 1], w2 = w[i + 2], w3 = w[i + 3];
            w[i] = w0 - lr * g0;
            w[i + 1] = w1 - lr * g1;
            w[i + 2] = w2 - lr * g2;
            w[i + 3] = w3 - lr * g3;
        }
    }
    for (; i < n; i++) {
        w[i] -= lr * (sign * gradient[i] + decay * w[i]);
    }
}
