/* Gradient of the gate of pm_glu */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_glu_gate_backward(pm_real *out, const pm_real *gradient, const pm_real *x, const pm_real *gate,
                          const int32_t *shape)
{
    PM_EACH_4(shape, i, j, k, l) {
        const pm_real part = PM_C(1.0) / (PM_C(1.0) + PM_EXP(-gate[l]));
        out[i] = gradient[j] * x[k] * part * (PM_C(1.0) - part);
    }
}
