/* Gradient of the slope of pm_prelu for each element, before the sum */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_prelu_slope_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[k] > 0 ? PM_C(0.0) : x[k] * gradient[j];
    }
}
