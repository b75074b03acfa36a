/* out = x + weight (y - x), from the nearer end */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_lerp(pm_real *out, const pm_real *x, const pm_real *y, const pm_real *weight, const int32_t *shape)
{
    PM_EACH_4(shape, i, j, k, l) {
        const pm_real part = weight[l];
        const pm_real way = y[k] - x[j];
        out[i] = part < PM_C(0.5) ? x[j] + part * way : y[k] - way * (PM_C(1.0) - part);
    }
}
