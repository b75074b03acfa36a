/* out = a b, or out += a b with accumulate; a is m times k, b is k times n

   The columns of out are contiguous, all other dimensions have strides. A tile of a weight is a range of n (columns
   of b and out), of k with accumulate, or of m (rows of a and out). */
#include "pm_mm.h"
#include "pm_kernels.h"

void pm_mm(pm_real *out, const pm_real *a, const pm_real *b, int32_t m, int32_t k, int32_t n, int32_t out_row,
           int32_t a_row, int32_t a_column, int32_t b_row, int32_t b_column, int32_t accumulate)
{
    const pm_mm_form form = {k, out_row, a_row, a_column, b_row, b_column, accumulate};
    pm_mm_all(out, a, b, m, n, form, 0);
}
