/* out = x, an integer, rounded to pm_real */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_int_to_real(pm_real *out, const int32_t *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = (pm_real)x[j];
    }
}
