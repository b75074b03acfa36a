/* out = x if the condition is true, otherwise y */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_where(pm_real *out, const uint8_t *condition, const pm_real *x, const pm_real *y, const int32_t *shape)
{
    PM_EACH_4(shape, i, j, k, l) {
        out[i] = condition[j] ? x[k] : y[l];
    }
}
