/* The gradients of batch norm: of x, of its weights and of its bias; pointers to unneeded ones are 0, and w may be
   0. With `training`, mean and inverse deviation are those of x; otherwise they are a running mean and a running
   *variance*, and the pointer dx must be 0: pm_batch_norm_fixed_backward computes that gradient. dx may be dy or x.
   `steps`: strides of batch, channel and element, in dx, in dy, in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_batch_norm_backward(pm_real *dx, pm_real *dw, pm_real *db, const pm_real *dy, const pm_real *x,
                            const pm_real *w, const pm_real *mean, const pm_real *inverse, const int32_t *steps,
                            int32_t batch, int32_t channels, int32_t plane, int32_t training, pm_real epsilon)
{
    const pm_real n = (pm_real)(batch * plane);
    /* Planes of one element are merged into one sequence. */
    const int32_t one = plane == 1, runs = one ? 1 : batch, places = batch * plane / runs;
    const int32_t to_step = steps[one ? 0 : 2], dy_step = steps[one ? 3 : 5], x_step = steps[one ? 6 : 8];
    for (int32_t c = 0; c < channels; c++) {
        const pm_real *back = dy + c * steps[4], *from = x + c * steps[7];
        const pm_real middle = mean[c];
        const pm_real scale = training ? inverse[c] : 1 / PM_SQRT(inverse[c] + epsilon);
        pm_total plain = {0, 0}, moment = {0, 0};
        for (int32_t i = 0; i < runs; i++) {
            pm_add_gradients(&plain, &moment, back + i * steps[3], dy_step, from + i * steps[6], x_step, places,
                             middle);
        }
        if (dw) {
            dw[c] = moment.sum * scale;
        }
        if (db) {
            db[c] = plain.sum;
        }
        const pm_real level = plain.sum / n, slope = moment.sum / n * scale * scale;
        const pm_real weight = scale * (w ? w[c] : 1);
        for (int32_t i = 0; dx && i < runs; i++) {
            pm_real *to = dx + c * steps[1] + i * steps[0];
            const pm_real *p = from + i * steps[6], *q = back + i * steps[3];
            PM_UNROLL(4)
            for (int32_t j = places; j > 0; j--) {
                *to = (*q - level - (*p - middle) * slope) * weight;
                to += to_step;
                q += dy_step;
                p += x_step;
            }
        }
    }
}
