/* Gradient of pm_binary_cross_entropy, times a factor; the smallest divisor of PyTorch is a float, also in double */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_binary_cross_entropy_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const pm_real *y,
                                      const int32_t *shape, pm_real factor)
{
    PM_EACH_4(shape, i, j, k, l) {
        const pm_real v = x[k];
        const pm_real w = y[l];
        const pm_real part = (PM_C(1.0) - v) * v;
        out[i] = factor * gradient[j] * (v - w) / (PM_MAX(part, PM_C(9.999999960041972e-13)));
    }
}
