/* Gradient of pm_nll_loss, written to out, which must be 0 before the call

   shape loops over gradient (with strides 0 for one number), out without its classes, and target. */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_nll_loss_backward(pm_real *out, const pm_real *gradient, const int32_t *target, const pm_real *weight,
                          const pm_real *total_weight, const int32_t *shape, int32_t class_step, int32_t weight_step,
                          int32_t ignored, int32_t is_mean)
{
    PM_EACH_3(shape, i, j, k) {
        if (target[k] != ignored) {
            const pm_real part = weight ? weight[target[k] * weight_step] : PM_C(1.0);
            out[j + target[k] * class_step] = -part * gradient[i] / (is_mean ? total_weight[0] : PM_C(1.0));
        }
    }
}
