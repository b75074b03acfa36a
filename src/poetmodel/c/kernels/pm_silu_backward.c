/* Gradient of pm_silu */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_silu_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        const pm_real part = PM_C(1.0) / (PM_C(1.0) + PM_EXP(-v));
        out[i] = gradient[j] * part * (PM_C(1.0) + v * (PM_C(1.0) - part));
    }
}
