/* out = -1, 0 or 1: the sign of x */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_sign(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = (pm_real)((x[j] > 0) - (x[j] < 0));
    }
}
