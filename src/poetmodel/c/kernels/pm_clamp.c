/* out = x, limited to low and high; NaN stays NaN */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_clamp(pm_real *out, const pm_real *x, const int32_t *shape, pm_real low, pm_real high)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = v < low ? low : v > high ? high : v;
    }
}
