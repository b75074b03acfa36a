/* out = whether x is not 0 */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_real_to_byte(uint8_t *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = x[j] != 0;
    }
}
