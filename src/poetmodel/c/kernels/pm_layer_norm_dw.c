/* The gradients of layer norm's weights and bias; either may be 0 (not needed). `steps`: strides of outer sequence,
   row and element, in dy, then in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_layer_norm_dw(pm_real *dw, pm_real *db, const pm_real *dy, const pm_real *x, const pm_real *mean,
                      const pm_real *inverse, const int32_t *steps, int32_t outer, int32_t rows, int32_t size)
{
    for (int32_t i = 0; i < size; i++) {
        pm_total plain = {0, 0}, moment = {0, 0};
        for (int32_t r = 0; r < outer * rows; r++) {
            const pm_real back = dy[r / rows * steps[0] + r % rows * steps[1] + i * steps[2]];
            const pm_real from = x[r / rows * steps[3] + r % rows * steps[4] + i * steps[5]];
            pm_add_to(&plain, back);
            pm_add_to(&moment, back * (from - mean[r]) * inverse[r]);
        }
        if (dw) {
            dw[i] = moment.sum;
        }
        if (db) {
            db[i] = plain.sum;
        }
    }
}
