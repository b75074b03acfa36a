/* A depthwise convolution: each output channel has one input channel; arguments as for pm_conv2d. */
#include "pm_depthwise.h"
#include "pm_kernels.h"

static void pm_plane(pm_real *out, const pm_real *x, pm_real w, const pm_seen *seen, const int32_t *shape)
{
    const int32_t step = shape[PM_STRIDE_W], next = shape[PM_STRIDE_H] * shape[PM_IN_W];
    for (int32_t i = seen->rows; i > 0; i--) {
        if (step == 1) {
            pm_add_scaled(out, 1, x, 1, w, seen->columns);
        } else if (step == 2) {
            pm_add_scaled(out, 1, x, 2, w, seen->columns);
        } else {
            pm_add_scaled(out, 1, x, step, w, seen->columns);
        }
        out += shape[PM_OUT_W];
        x += next;
    }
}

void pm_depthwise(pm_real *out, const pm_real *x, const pm_real *w, const pm_real *bias, const int32_t *shape,
                  int32_t batch, int32_t first, int32_t count, int32_t out_step)
{
    const int32_t each = shape[PM_OUT] / shape[PM_IN], window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    const int32_t plane = shape[PM_IN_H] * shape[PM_IN_W], out_plane = shape[PM_OUT_H] * shape[PM_OUT_W];
    for (int32_t n = 0; n < batch; n++) {
        pm_real *to = out + n * out_step;
        for (int32_t o = 0; o < count; o++) {
            const pm_real start = bias ? bias[o] : 0;
            for (int32_t i = out_plane; i > 0; i--) {
                *to++ = start;
            }
        }
    }
    if (pm_is_same_3x3(shape)) {
        for (int32_t n = 0; n < batch; n++) {
            for (int32_t o = 0; o < count; o++) {
                const pm_real *from = x + (n * shape[PM_IN] + (first + o) / each) * plane;
                pm_real *to = out + n * out_step + o * plane;
                for (int32_t i = 0; i < shape[PM_OUT_H]; i++) {
                    pm_add_row_3x3(to + i * shape[PM_OUT_W], from, w + o * 9, 1, i, shape[PM_IN_H], shape[PM_IN_W]);
                }
            }
        }
        return;
    }
    for (int32_t tap = 0; tap < window; tap++) {
        const pm_seen seen = pm_tap_seen(shape, tap);
        for (int32_t n = 0; n < batch; n++) {
            pm_real *to = out + n * out_step + seen.out;
            const pm_real *image = x + n * shape[PM_IN] * plane + seen.x;
            for (int32_t o = 0; o < count; o++) {
                pm_plane(to, image + (first + o) / each * plane, w[o * window + tap], &seen, shape);
                to += out_plane;
            }
        }
    }
}
