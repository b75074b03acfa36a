/* Gradient of pm_hardshrink and pm_softshrink */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_shrink_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape, pm_real limit)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        out[i] = v >= -limit && v <= limit ? PM_C(0.0) : gradient[j];
    }
}
