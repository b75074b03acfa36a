/* Gradient of pm_elu; with is_result, x is its output */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_elu_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape,
                     int32_t is_result, pm_real negative, pm_real positive, pm_real input_scale)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        const pm_real factor = is_result ? v + negative : negative * PM_EXP(v * input_scale);
        out[i] = v <= 0 ? gradient[j] * input_scale * factor : gradient[j] * positive;
    }
}
