/* out = start, start + step, ... */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_arange(pm_real *out, int32_t n, pm_real start, pm_real step)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = start + (pm_real)i * step;
    }
}
