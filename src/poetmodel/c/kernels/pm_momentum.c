/* Stochastic gradient descent with momentum, by Nesterov's form with is_nesterov; `fresh` is 1 - dampening

   A buffer of NaN has no value yet and starts with the gradient, as in PyTorch. */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_momentum(pm_real *w, pm_real *buffer, const pm_real *gradient, int32_t n, int32_t is_nesterov, pm_real lr,
                 pm_real sign, pm_real decay, pm_real momentum, pm_real fresh)
{
    for (int32_t i = 0; i < n; i++) {
        const pm_real g = sign * gradient[i] + decay * w[i];
        const pm_real mean = buffer[i] != buffer[i] ? g : buffer[i] * momentum + fresh * g;
        buffer[i] = mean;
        w[i] -= lr * (is_nesterov ? g + momentum * mean : mean);
    }
}
