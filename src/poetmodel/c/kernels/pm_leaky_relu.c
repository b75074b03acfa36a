/* out = x if it is above 0, otherwise slope x */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_leaky_relu(pm_real *out, const pm_real *x, const int32_t *shape, pm_real slope)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = v > 0 ? v : v * slope;
    }
}
