/* out = x, rounded towards 0 to int32_t; x must be in its range */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_real_to_int(int32_t *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = (int32_t)x[j];
    }
}
