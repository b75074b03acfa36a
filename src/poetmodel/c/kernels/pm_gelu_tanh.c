/* out = x times the normal distribution function of x, approximated by tanh */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_gelu_tanh(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        const pm_real inner = PM_C(0.79788456080286535588) * (v + PM_C(0.044715) * v * v * v);
        out[i] = PM_C(0.5) * v * (PM_C(1.0) + PM_TANH(inner));
    }
}
