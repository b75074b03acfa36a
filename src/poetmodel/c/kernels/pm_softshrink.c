/* out = x moved towards 0 by a number, 0 if |x| is smaller */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_softshrink(pm_real *out, const pm_real *x, const int32_t *shape, pm_real limit)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = v > limit ? v - limit : v < -limit ? v + limit : v * PM_C(0.0);
    }
}
