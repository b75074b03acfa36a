/* out = x + alpha * y */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_add(pm_real *out, const pm_real *x, const pm_real *y, const int32_t *shape, pm_real alpha)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[j] + alpha * y[k];
    }
}
