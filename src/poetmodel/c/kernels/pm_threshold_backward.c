/* Gradient of pm_threshold; x may be its output if threshold and value are equal */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_threshold_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const int32_t *shape,
                           pm_real threshold)
{
    PM_EACH_3(shape, i, j, k) {
        const pm_real v = x[k];
        out[i] = v <= threshold ? PM_C(0.0) : gradient[j];
    }
}
