/* out = softmax of n elements; outer is the shape table of the rows of out and x, which may be the same

   With is_safe, a row of -infinity becomes 0. */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_softmax(pm_real *out, const pm_real *x, const int32_t *outer, int32_t n, int32_t out_step, int32_t x_step,
                int32_t is_safe)
{
    PM_EACH_2(outer, i, j) {
        pm_real most = -PM_INFINITY;
        for (int32_t k = 0; k < n; k++) {
            most = PM_MAX(x[j + k * x_step], most);
        }
        if (is_safe && most == -PM_INFINITY) {
            for (int32_t k = 0; k < n; k++) {
                out[i + k * out_step] = 0;
            }
            continue;
        }
        pm_total total = {0, 0};
        for (int32_t k = 0; k < n; k++) {
            const pm_real part = PM_EXP(x[j + k * x_step] - most);
            out[i + k * out_step] = part;
            pm_add_to(&total, part);
        }
        for (int32_t k = 0; k < n; k++) {
            out[i + k * out_step] /= total.sum;
        }
    }
}
