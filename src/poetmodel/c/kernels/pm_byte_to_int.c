/* out = x, a byte, as int32_t */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_byte_to_int(int32_t *out, const uint8_t *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = (int32_t)x[j];
    }
}
