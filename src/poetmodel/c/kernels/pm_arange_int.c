/* out = start, start + step, ... */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_arange_int(int32_t *out, int32_t n, int32_t start, int32_t step)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = start + i * step;
    }
}
