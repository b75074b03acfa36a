/* out = log(1 + exp(beta x)) / beta, or x if beta x is above the threshold */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_softplus(pm_real *out, const pm_real *x, const int32_t *shape, pm_real beta, pm_real threshold)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = v * beta > threshold ? v : PM_LOG1P(PM_EXP(v * beta)) / beta;
    }
}
