/* out = 1 / square root of x */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_rsqrt(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = PM_C(1.0) / PM_SQRT(x[j]);
    }
}
