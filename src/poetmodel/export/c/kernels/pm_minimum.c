/* out = the smaller of x and y, NaN where either is */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_minimum(pm_real *out, const pm_real *x, const pm_real *y, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[j] < y[k] || x[j] != x[j] ? x[j] : y[k];
    }
}
