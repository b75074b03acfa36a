/* Gradient of pm_leaky_relu */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_leaky_relu_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape,
                            pm_real slope)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        out[i] = v > 0 ? gradient[j] : gradient[j] * slope;
    }
}
