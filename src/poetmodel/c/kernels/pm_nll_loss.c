/* Losses -weight[target] x[target] of rows of x: their sum, their mean, or each

   shape loops over out (with strides 0 for one number), x without its classes, and target. total_weight is that of
   all targets except ignored ones. Without weight, all weights are 1. */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_nll_loss(pm_real *out, pm_real *total_weight, const pm_real *x, const int32_t *target, const pm_real *weight,
                 const int32_t *shape, int32_t class_step, int32_t weight_step, int32_t ignored, int32_t is_reduced,
                 int32_t is_mean)
{
    pm_total loss = {0, 0};
    pm_total all = {0, 0};
    PM_EACH_3(shape, i, j, k) {
        pm_real part = PM_C(0.0);
        pm_real one = PM_C(0.0);
        if (target[k] != ignored) {
            part = weight ? weight[target[k] * weight_step] : PM_C(1.0);
            one = -part * x[j + target[k] * class_step];
        }
        pm_add_to(&loss, one);
        pm_add_to(&all, part);
        if (!is_reduced) {
            out[i] = one;
        }
    }
    if (is_reduced) {
        out[0] = is_mean ? loss.sum / all.sum : loss.sum;
    }
    total_weight[0] = is_reduced ? all.sum : PM_C(0.0);
}
