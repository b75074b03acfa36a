/* Threshold and ReLU: out = x if it is above the threshold, or NaN, otherwise a number */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_threshold(pm_real *out, const pm_real *x, const int32_t *shape, pm_real threshold, pm_real value)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = v <= threshold ? value : v;
    }
}
