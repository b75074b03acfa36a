/* out = x tanh(log(1 + exp(x))) */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_mish(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = v * PM_TANH(PM_LOG1P(PM_EXP(v)));
    }
}
