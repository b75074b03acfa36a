/* out = smaller of x and y, NaN if either is NaN */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_minimum(pm_real *out, const pm_real *x, const pm_real *y, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[j] < y[k] || x[j] != x[j] ? x[j] : y[k];
    }
}
