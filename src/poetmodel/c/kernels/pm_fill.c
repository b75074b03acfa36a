/* out = a number, for n elements */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_fill(pm_real *out, int32_t n, pm_real value)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = value;
    }
}
