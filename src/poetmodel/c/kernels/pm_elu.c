/* ELU, SELU and CELU: out = negative (exp(input_scale x) - 1) if x is at most 0, otherwise positive x */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_elu(pm_real *out, const pm_real *x, const int32_t *shape, pm_real negative, pm_real positive,
            pm_real input_scale)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        out[i] = v <= 0 ? PM_EXPM1(v * input_scale) * negative : v * positive;
    }
}
