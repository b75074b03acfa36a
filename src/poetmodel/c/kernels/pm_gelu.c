/* out = x times the normal distribution function of x */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_gelu(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = PM_C(0.5) * v * (PM_C(1.0) + PM_ERF(v * PM_C(0.70710678118654752440)));
    }
}
