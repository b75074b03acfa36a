/* out = x if the condition is true, otherwise y */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_where_byte(uint8_t *out, const uint8_t *condition, const uint8_t *x, const uint8_t *y, const int32_t *shape)
{
    PM_EACH_4(shape, i, j, k, l) {
        out[i] = condition[j] ? x[k] : y[l];
    }
}
