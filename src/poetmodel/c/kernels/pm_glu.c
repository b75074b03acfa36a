/* out = x / (1 + exp(-gate)) */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_glu(pm_real *out, const pm_real *x, const pm_real *gate, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[j] / (PM_C(1.0) + PM_EXP(-gate[k]));
    }
}
