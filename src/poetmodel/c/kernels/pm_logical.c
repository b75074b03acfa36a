/* out = a function of two truth values: bits 0 to 3 of `truth` for (0, 0), (0, 1), (1, 0), (1, 1) */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_logical(uint8_t *out, const uint8_t *x, const uint8_t *y, const int32_t *shape, int32_t truth)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = (uint8_t)(truth >> ((x[j] ? 2 : 0) + (y[k] ? 1 : 0)) & 1);
    }
}
