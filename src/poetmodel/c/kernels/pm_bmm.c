/* As pm_mm for several products, with strides between their matrices */
#include "pm_mm.h"
#include "pm_kernels.h"

void pm_bmm(pm_real *out, const pm_real *a, const pm_real *b, int32_t batch, int32_t m, int32_t k, int32_t n,
            int32_t out_batch, int32_t out_row, int32_t a_batch, int32_t a_row, int32_t a_column, int32_t b_batch,
            int32_t b_row, int32_t b_column, int32_t accumulate)
{
    const pm_mm_form form = {k, out_row, a_row, a_column, b_row, b_column, accumulate};
    for (int32_t i = 0; i < batch; i++) {
        pm_mm_all(out + i * out_batch, a + i * a_batch, b + i * b_batch, m, n, form, 0);
    }
}
