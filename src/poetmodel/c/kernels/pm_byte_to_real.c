/* out = x, a byte, as pm_real */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_byte_to_real(pm_real *out, const uint8_t *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = (pm_real)x[j];
    }
}
