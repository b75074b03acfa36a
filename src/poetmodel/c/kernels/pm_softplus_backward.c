/* Gradient of pm_softplus */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_softplus_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape,
                          pm_real beta, pm_real threshold)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        const pm_real z = PM_EXP(v * beta);
        out[i] = v * beta > threshold ? gradient[j] : gradient[j] * z / (z + PM_C(1.0));
    }
}
