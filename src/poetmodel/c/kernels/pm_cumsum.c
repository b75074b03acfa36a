/* out = cumulative sums of n elements; outer is the shape table of the rows of out and x */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_cumsum(pm_real *out, const pm_real *x, const int32_t *outer, int32_t n, int32_t out_step, int32_t x_step)
{
    PM_EACH_2(outer, i, j) {
        pm_total total = {0, 0};
        for (int32_t k = 0; k < n; k++) {
            pm_add_to(&total, x[j + k * x_step]);
            out[i + k * out_step] = total.sum;
        }
    }
}
