/* Gradient of pm_hardswish */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_hardswish_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        out[i] = v <= PM_C(-3.0) ? PM_C(0.0) : v < PM_C(3.0) ? gradient[j] * (v / PM_C(3.0) + PM_C(0.5)) : gradient[j];
    }
}
