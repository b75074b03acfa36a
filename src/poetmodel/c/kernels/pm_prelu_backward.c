/* Gradient of pm_prelu */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_prelu_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const pm_real *slope,
                       const int32_t *shape)
{
    PM_EACH_4(shape, i, j, k, l) {
        out[i] = x[k] > 0 ? gradient[j] : gradient[j] * slope[l];
    }
}
