/* out = x * y */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_mul_int(int32_t *out, const int32_t *x, const int32_t *y, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[j] * y[k];
    }
}
