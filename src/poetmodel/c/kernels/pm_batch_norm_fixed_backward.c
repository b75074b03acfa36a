/* The gradients of pm_batch_norm_fixed, of x and of its bias; pointers to unneeded ones are 0, and w may be 0. dx
   may be dy. `steps`: strides of batch, channel and element, in dx, then in dy. */
#include "pm_total.h"
#include "pm_kernels.h"

void pm_batch_norm_fixed_backward(pm_real *dx, pm_real *db, const pm_real *dy, const pm_real *w,
                                  const pm_real *variance, const int32_t *steps, int32_t batch, int32_t channels,
                                  int32_t plane, pm_real epsilon)
{
    for (int32_t c = 0; c < channels; c++) {
        const pm_real scale = 1 / PM_SQRT(variance[c] + epsilon) * (w ? w[c] : 1);
        pm_total total = {0, 0};
        for (int32_t i = 0; i < batch; i++) {
            pm_real *to = dx ? dx + c * steps[1] + i * steps[0] : 0;
            const pm_real *p = dy + c * steps[4] + i * steps[3];
            for (int32_t j = plane; j > 0; j--) {
                const pm_real gradient = *p;
                if (db) {
                    pm_add_to(&total, gradient);
                }
                if (to) {
                    *to = gradient * scale;
                    to += steps[2];
                }
                p += steps[5];
            }
        }
        if (db) {
            db[c] = total.sum;
        }
    }
}
