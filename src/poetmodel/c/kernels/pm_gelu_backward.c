/* Gradient of pm_gelu */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_gelu_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        const pm_real part = PM_C(0.5) * (PM_C(1.0) + PM_ERF(v * PM_C(0.70710678118654752440)));
        const pm_real density = PM_C(0.39894228040143267794) * PM_EXP(PM_C(-0.5) * v * v);
        out[i] = gradient[j] * (part + v * density);
    }
}
