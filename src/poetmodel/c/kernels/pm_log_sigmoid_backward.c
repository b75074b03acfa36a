/* Gradient of pm_log_sigmoid */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_log_sigmoid_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        const pm_real z = PM_EXP(-PM_FABS(v));
        out[i] = gradient[j] * ((v < 0 ? PM_C(1.0) : z) / (PM_C(1.0) + z));
    }
}
