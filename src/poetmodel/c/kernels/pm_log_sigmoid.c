/* out = log(1 / (1 + exp(-x))) */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_log_sigmoid(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = (v < 0 ? v : PM_C(0.0)) - PM_LOG1P(PM_EXP(-PM_FABS(v)));
    }
}
