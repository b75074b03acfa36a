/* out = x log(y), or 0 if x is 0 */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_xlogy(pm_real *out, const pm_real *x, const pm_real *y, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = y[k] != y[k] ? y[k] : x[j] == 0 ? PM_C(0.0) : x[j] * PM_LOG(y[k]);
    }
}
