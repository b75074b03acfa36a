/* The gradient of the input of a depthwise convolution; arguments as for pm_conv2d_dx. */
#include "pm_depthwise.h"
#include "pm_kernels.h"

static void pm_plane(pm_real *dx, const pm_real *dy, pm_real w, const pm_seen *seen, const int32_t *shape)
{
    const int32_t step = shape[PM_STRIDE_W], next = shape[PM_STRIDE_H] * shape[PM_IN_W];
    for (int32_t i = seen->rows; i > 0; i--) {
        if (step == 1) {
            pm_add_scaled(dx, 1, dy, 1, w, seen->columns);
        } else if (step == 2) {
            pm_add_scaled(dx, 2, dy, 1, w, seen->columns);
        } else {
            pm_add_scaled(dx, step, dy, 1, w, seen->columns);
        }
        dx += next;
        dy += shape[PM_OUT_W];
    }
}

void pm_depthwise_dx(pm_real *dx, const pm_real *dy, const pm_real *w, const int32_t *shape, int32_t batch,
                     int32_t first, int32_t count, int32_t dy_step, int32_t accumulate)
{
    const int32_t each = shape[PM_OUT] / shape[PM_IN], window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    const int32_t plane = shape[PM_IN_H] * shape[PM_IN_W], out_plane = shape[PM_OUT_H] * shape[PM_OUT_W];
    if (!accumulate) {
        for (int32_t i = 0; i < batch * shape[PM_IN] * plane; i++) {
            dx[i] = 0;
        }
    }
    if (pm_is_same_3x3(shape)) {
        for (int32_t n = 0; n < batch; n++) {
            for (int32_t o = 0; o < count; o++) {
                pm_real *to = dx + (n * shape[PM_IN] + (first + o) / each) * plane;
                const pm_real *from = dy + n * dy_step + o * plane, *last = w + o * 9 + 8;
                for (int32_t i = 0; i < shape[PM_IN_H]; i++) {
                    pm_add_row_3x3(to + i * shape[PM_IN_W], from, last, -1, i, shape[PM_IN_H], shape[PM_IN_W]);
                }
            }
        }
        return;
    }
    /* The output channels of one input channel are added one after the other, as by calls for ranges of them. */
    for (int32_t turn = 0; turn < each; turn++) {
        for (int32_t tap = 0; tap < window; tap++) {
            const pm_seen seen = pm_tap_seen(shape, tap);
            for (int32_t n = 0; n < batch; n++) {
                pm_real *to = dx + n * shape[PM_IN] * plane + seen.x;
                const pm_real *from = dy + n * dy_step + seen.out;
                for (int32_t o = (turn - first % each + each) % each; o < count; o += each) {
                    pm_plane(to + (first + o) / each * plane, from + o * out_plane, w[o * window + tap], &seen, shape);
                }
            }
        }
    }
}
