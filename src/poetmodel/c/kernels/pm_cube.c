/* out = x to the power of 3 */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_cube(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        out[i] = x[j] * x[j] * x[j];
    }
}
