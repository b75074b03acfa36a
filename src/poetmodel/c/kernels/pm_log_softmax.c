/* out = log of the softmax of n elements; outer is the shape table of the rows of out and x, which may be the same */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_log_softmax(pm_real *out, const pm_real *x, const int32_t *outer, int32_t n, int32_t out_step, int32_t x_step)
{
    PM_EACH_2(outer, i, j) {
        pm_real most = -PM_INFINITY;
        for (int32_t k = 0; k < n; k++) {
            most = PM_MAX(x[j + k * x_step], most);
        }
        pm_total total = {0, 0};
        for (int32_t k = 0; k < n; k++) {
            pm_add_to(&total, PM_EXP(x[j + k * x_step] - most));
        }
        const pm_real lost = PM_LOG(total.sum);
        for (int32_t k = 0; k < n; k++) {
            out[i + k * out_step] = x[j + k * x_step] - most - lost;
        }
    }
}
