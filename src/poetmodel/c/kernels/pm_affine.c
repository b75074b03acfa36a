/* out = x * factor + shift */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_affine(pm_real *out, const pm_real *x, const int32_t *shape, pm_real factor, pm_real shift)
{
    PM_EACH_2(shape, i, j) {
        out[i] = x[j] * factor + shift;
    }
}
