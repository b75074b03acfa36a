/* Gradient of pm_gelu_tanh */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_gelu_tanh_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        const pm_real inner = PM_C(0.79788456080286535588) * (v + PM_C(0.044715) * v * v * v);
        const pm_real t = PM_TANH(inner);
        const pm_real slope = PM_C(0.79788456080286535588) * (PM_C(1.0) + PM_C(0.134145) * v * v);
        out[i] = gradient[j] * PM_C(0.5) * (PM_C(1.0) + t + v * (PM_C(1.0) - t * t) * slope);
    }
}
