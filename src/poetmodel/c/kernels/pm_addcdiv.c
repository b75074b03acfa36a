/* out = x + value y / z */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_addcdiv(pm_real *out, const pm_real *x, const pm_real *y, const pm_real *z, const int32_t *shape,
                pm_real value)
{
    PM_EACH_4(shape, i, j, k, l) {
        out[i] = x[j] + value * y[k] / z[l];
    }
}
