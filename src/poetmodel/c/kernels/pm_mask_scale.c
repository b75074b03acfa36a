/* out = factor x if the mask is true, otherwise 0 */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_mask_scale(pm_real *out, const pm_real *x, const uint8_t *mask, const int32_t *shape, pm_real factor)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = mask[k] ? x[j] * factor : PM_C(0.0);
    }
}
