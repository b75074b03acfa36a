/* Gradient of pm_clamp: 0 at and beyond its limits */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_hardtanh_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape, pm_real low,
                          pm_real high)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        out[i] = v <= low || v >= high ? PM_C(0.0) : gradient[j];
    }
}
