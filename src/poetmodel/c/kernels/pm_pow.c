/* out = x to the power of a number */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_pow(pm_real *out, const pm_real *x, const int32_t *shape, pm_real exponent)
{
    PM_EACH_2(shape, i, j) {
        out[i] = PM_POW(x[j], exponent);
    }
}
