/* Gradients of the weights of depthwise convolutions. */
#ifndef PM_DEPTHWISE_DW_H
#define PM_DEPTHWISE_DW_H

#include "pm_depthwise.h"
#include "pm_update.h"

static inline pm_real pm_dot(pm_real sum, const pm_real *x, const int32_t step, const pm_real *dy, int32_t n)
{
    for (; n >= 4; n -= 4) {
        sum += x[0] * dy[0];
        sum += x[step] * dy[1];
        sum += x[2 * step] * dy[2];
        sum += x[3 * step] * dy[3];
        x += 4 * step;
        dy += 4;
    }
    for (; n > 0; n--) {
        sum += *x * *dy++;
        x += step;
    }
    return sum;
}

/* sums[k] += x[j + k - 1] * dy[j], for three adjacent taps, with zeros around x. */
static void pm_add_three_dots(pm_real *sums, const pm_real *x, const pm_real *dy, int32_t width)
{
    pm_real left = sums[0], middle = sums[1], right = sums[2];
    pm_real a = 0, b = x[0], c;
    for (; width > 3; width -= 3) {
        c = x[1];
        left += a * dy[0], middle += b * dy[0], right += c * dy[0];
        a = x[2];
        left += b * dy[1], middle += c * dy[1], right += a * dy[1];
        b = x[3];
        left += c * dy[2], middle += a * dy[2], right += b * dy[2];
        x += 3, dy += 3;
    }
    for (; width > 1; width--) {
        c = x[1];
        left += a * *dy, middle += b * *dy, right += c * *dy;
        a = b, b = c;
        x++, dy++;
    }
    sums[0] = left + a * *dy, sums[1] = middle + b * *dy, sums[2] = right;
}

static void pm_dw_3x3(pm_real *dw, const pm_real *x, const pm_real *dy, const int32_t *shape, int32_t batch,
                      int32_t x_step, int32_t dy_step, const pm_update *u)
{
    const int32_t height = shape[PM_IN_H], width = shape[PM_IN_W];
    pm_real sums[9] = {0};
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t i = 0; i < height; i++) {
            const pm_real *row = x + n * x_step + i * width, *back = dy + n * dy_step + i * width;
            if (i > 0) {
                pm_add_three_dots(sums, row - width, back, width);
            }
            pm_add_three_dots(sums + 3, row, back, width);
            if (i + 1 < height) {
                pm_add_three_dots(sums + 6, row + width, back, width);
            }
        }
    }
    for (int32_t tap = 0; tap < 9; tap++) {
        pm_put(dw + tap, sums[tap], u);
    }
}

static inline void pm_depthwise_dw_all(pm_real *dw, const pm_real *x, const pm_real *dy, const int32_t *shape,
                                       int32_t batch, int32_t first, int32_t count, int32_t dy_step,
                                       int32_t x_step, const pm_update *u)
{
    const int32_t each = shape[PM_OUT] / shape[PM_IN], window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    const int32_t plane = shape[PM_IN_H] * shape[PM_IN_W], out_plane = shape[PM_OUT_H] * shape[PM_OUT_W];
    const int32_t step = shape[PM_STRIDE_W], next = shape[PM_STRIDE_H] * shape[PM_IN_W];
    if (pm_is_same_3x3(shape)) {
        for (int32_t o = 0; o < count; o++) {
            pm_dw_3x3(dw + o * 9, x + (first + o) / each * plane, dy + o * plane, shape, batch, x_step, dy_step,
                      u);
        }
        return;
    }
    for (int32_t tap = 0; tap < window; tap++) {
        const pm_seen seen = pm_tap_seen(shape, tap);
        for (int32_t o = 0; o < count; o++) {
            pm_real sum = 0;
            for (int32_t n = 0; n < batch; n++) {
                const pm_real *from = x + n * x_step + (first + o) / each * plane + seen.x;
                const pm_real *back = dy + n * dy_step + o * out_plane + seen.out;
                for (int32_t i = seen.rows; i > 0; i--) {
                    if (step == 1) {
                        sum = pm_dot(sum, from, 1, back, seen.columns);
                    } else if (step == 2) {
                        sum = pm_dot(sum, from, 2, back, seen.columns);
                    } else {
                        sum = pm_dot(sum, from, step, back, seen.columns);
                    }
                    from += next;
                    back += shape[PM_OUT_W];
                }
            }
            pm_put(dw + o * window + tap, sum, u);
        }
    }
}

#endif
