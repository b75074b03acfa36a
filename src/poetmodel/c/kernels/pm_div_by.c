/* out = x / divisor */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_div_by(pm_real *out, const pm_real *x, const int32_t *shape, pm_real divisor)
{
    PM_EACH_2(shape, i, j) {
        out[i] = x[j] / divisor;
    }
}
