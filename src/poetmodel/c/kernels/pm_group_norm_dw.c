/* The gradients of group norm's weights and bias; either may be 0 (not needed). `steps`: strides of batch, channel
   and element, in dy, then in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_group_norm_dw(pm_real *dw, pm_real *db, const pm_real *dy, const pm_real *x, const pm_real *mean,
                      const pm_real *inverse, const int32_t *steps, int32_t batch, int32_t channels, int32_t plane,
                      int32_t groups)
{
    const int32_t each = channels / groups;
    for (int32_t c = 0; c < channels; c++) {
        pm_total plain = {0, 0}, weighted = {0, 0};
        for (int32_t n = 0; n < batch; n++) {
            const int32_t g = n * groups + c / each;
            pm_total moment = {0, 0};
            pm_add_gradients(&plain, &moment, dy + n * steps[0] + c * steps[1], steps[2],
                             x + n * steps[3] + c * steps[4], steps[5], plane, mean[g]);
            pm_add_to(&weighted, moment.sum * inverse[g]);
        }
        if (dw) {
            dw[c] = weighted.sum;
        }
        if (db) {
            db[c] = plain.sum;
        }
    }
}
