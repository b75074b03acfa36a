/* out = a number if the mask is true, otherwise x */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_masked_fill(pm_real *out, const pm_real *x, const uint8_t *mask, const int32_t *shape, pm_real value)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = mask[k] ? value : x[j];
    }
}
