/* Gradient of pm_softmax from its output y; outer is the shape table of the rows; out may be an input */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_softmax_backward(pm_real *out, const pm_real *gradient, const pm_real *y, const int32_t *outer, int32_t n,
                         int32_t out_step, int32_t gradient_step, int32_t y_step)
{
    PM_EACH_3(outer, i, j, l) {
        pm_total total = {0, 0};
        for (int32_t k = 0; k < n; k++) {
            pm_add_to(&total, gradient[j + k * gradient_step] * y[l + k * y_step]);
        }
        for (int32_t k = 0; k < n; k++) {
            out[i + k * out_step] = (gradient[j + k * gradient_step] - total.sum) * y[l + k * y_step];
        }
    }
}
