/* out = x if it is above 0, otherwise slope x */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_prelu(pm_real *out, const pm_real *x, const pm_real *slope, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[j] > 0 ? x[j] : x[j] * slope[k];
    }
}
