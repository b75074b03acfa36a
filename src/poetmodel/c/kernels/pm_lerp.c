/* out = x + weight (y - x), computed from the nearer end */
#include "pm_each.h"
#include "pm_lerp.h"
#include "pm_kernels.h"

void pm_lerp(pm_real *out, const pm_real *x, const pm_real *y, const pm_real *weight, const int32_t *shape)
{
    PM_EACH_4(shape, i, j, k, l) {
        out[i] = pm_between(x[j], y[k], weight[l]);
    }
}
