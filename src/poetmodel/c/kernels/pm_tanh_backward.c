/* Gradient of pm_tanh from its output y */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_tanh_backward(pm_real *out, const pm_real *gradient, const pm_real *y, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = y[k];
        out[i] = gradient[j] * (PM_C(1.0) - v * v);
    }
}
