/* out = the same values in each of m rows of n columns */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_fill_rows(pm_real *out, const pm_real *values, int32_t m, int32_t n, int32_t out_row, int32_t step)
{
    for (int32_t i = 0; i < m; i++) {
        for (int32_t j = 0; j < n; j++) {
            out[i * out_row + j] = values[j * step];
        }
    }
}
