/* Gradients of the weights of convolutions. Sums go over batch, rows and columns in order. */
#ifndef PM_CONV2D_DW_H
#define PM_CONV2D_DW_H

#include "pm_conv.h"
#include "pm_update.h"

/* The rectangles of x and of dy that one tap of the window multiplies, for each element of the batch. */
typedef struct {
    int32_t batch, rows, columns;
    int32_t x_batch, x_row, x_step, x_channel;
    int32_t y_batch, y_row, y_channel;
} pm_tap;

#define PM_SUM_PLACES(UNROLL, START, ...)                 \
    for (int32_t n = t->batch; n > 0; n--) {              \
        const pm_real *x_row = x, *y_row = y;             \
        for (int32_t i = t->rows; i > 0; i--) {           \
            const pm_real *p = x_row, *q = y_row;         \
            START                                         \
            UNROLL                                        \
            for (int32_t j = columns; j > 0; j--) {       \
                __VA_ARGS__                               \
            }                                             \
            x_row += t->x_row;                            \
            y_row += t->y_row;                            \
        }                                                 \
        x += t->x_batch;                                  \
        y += t->y_batch;                                  \
    }

#define PM_FOUR_GRADIENTS const pm_real *q1 = q + y_channel, *q2 = q1 + y_channel, *q3 = q2 + y_channel;
#define PM_FOUR_INPUTS const pm_real *p1 = p + x_channel, *p2 = p1 + x_channel, *p3 = p2 + x_channel;
#define PM_ADD_FOUR(a, input)                    \
    {                                            \
        const pm_real v = *input;                \
        input += step;                           \
        a##0 += v * y0, a##1 += v * y1;          \
        a##2 += v * y2, a##3 += v * y3;          \
    }
#define PM_STORE_FOUR(a, n)                                                                              \
    {                                                                                                    \
        pm_real *o = dw + (n) * window;                                                                  \
        if (!u) {                                                                                        \
            o[0] = a##0, o[filter] = a##1, o[2 * filter] = a##2, o[3 * filter] = a##3;                   \
        } else {                                                                                         \
            pm_put_filters(o, filter, a##0, a##1, a##2, a##3, u);                                        \
        }                                                                                                \
    }

static PM_OUT_OF_LINE void pm_put_filters(pm_real *o, int32_t filter, pm_real s0, pm_real s1, pm_real s2, pm_real s3,
                                          const pm_update *u)
{
    pm_put(o, s0, u), pm_put(o + filter, s1, u), pm_put(o + 2 * filter, s2, u), pm_put(o + 3 * filter, s3, u);
}

/* Four input channels, four output channels. */
static void pm_dw_4x4(const pm_tap *t, pm_real *dw, int32_t filter, int32_t window, const pm_real *x, const pm_real *y,
                      const pm_update *u)
{
    const int32_t columns = t->columns, step = t->x_step, x_channel = t->x_channel, y_channel = t->y_channel;
    pm_real a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    pm_real d0 = 0, d1 = 0, d2 = 0, d3 = 0, e0 = 0, e1 = 0, e2 = 0, e3 = 0;
    PM_SUM_PLACES(, PM_FOUR_GRADIENTS PM_FOUR_INPUTS,
                  const pm_real y0 = *q++, y1 = *q1++, y2 = *q2++, y3 = *q3++;
                  PM_ADD_FOUR(a, p) PM_ADD_FOUR(b, p1) PM_ADD_FOUR(d, p2) PM_ADD_FOUR(e, p3))
    PM_STORE_FOUR(a, 0)
    PM_STORE_FOUR(b, 1)
    PM_STORE_FOUR(d, 2)
    PM_STORE_FOUR(e, 3)
}

/* One input channel, four output channels. */
static void pm_dw_1x4(const pm_tap *t, pm_real *dw, int32_t filter, const pm_real *x, const pm_real *y,
                      const pm_update *u)
{
    const int32_t columns = t->columns, step = t->x_step, y_channel = t->y_channel;
    pm_real a = 0, b = 0, d = 0, e = 0;
    PM_SUM_PLACES(, PM_FOUR_GRADIENTS, const pm_real v = *p; p += step;
                  a += v * *q++; b += v * *q1++; d += v * *q2++; e += v * *q3++;)
    if (!u) {
        dw[0] = a, dw[filter] = b, dw[2 * filter] = d, dw[3 * filter] = e;
    } else {
        pm_put_filters(dw, filter, a, b, d, e, u);
    }
}

/* One input channel, one output channel. */
static pm_real pm_dw_1x1(const pm_tap *t, const pm_real *x, const pm_real *y)
{
    const int32_t columns = t->columns, step = t->x_step;
    pm_real a = 0;
    PM_SUM_PLACES(PM_UNROLL(4), , a += *p * *q++; p += step;)
    return a;
}

/* One tap of the window for some output channels of one group. */
static void pm_dw_tap(const pm_tap *t, pm_real *dw, const int32_t *shape, int32_t results, const pm_real *x,
                      const pm_real *y, const pm_update *u)
{
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS], window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    const int32_t filter = pm_filter(shape);
    if (t->batch == 1 && t->rows == 1 && t->columns == 1) {
        for (int32_t o = 0; o < results; o++) {
            pm_real *to = dw + o * filter;
            const pm_real *from = x, v = y[o * t->y_channel];
            for (int32_t i = channels; i > 0; i--) {
                pm_put(to, v * *from, u);
                to += window;
                from += t->x_channel;
            }
        }
        return;
    }
    for (int32_t o = 0; o < results;) {
        const int32_t four = results - o >= 4;
        for (int32_t i = 0; i < channels;) {
            pm_real *to = dw + o * filter + i * window;
            const pm_real *from = x + i * t->x_channel, *back = y + o * t->y_channel;
            if (four && channels - i >= 4) {
                pm_dw_4x4(t, to, filter, window, from, back, u);
                i += 4;
            } else if (four) {
                pm_dw_1x4(t, to, filter, from, back, u);
                i++;
            } else {
                pm_put(to, pm_dw_1x1(t, from, back), u);
                i++;
            }
        }
        o += four ? 4 : 1;
    }
}

static inline void pm_dw_all(pm_real *dw, const pm_real *x, const pm_real *dy, const int32_t *shape, int32_t batch,
                             int32_t first, int32_t count, int32_t dy_step, int32_t x_step, const pm_update *u)
{
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS], results = shape[PM_OUT] / shape[PM_GROUPS];
    const int32_t width = shape[PM_IN_W], plane = shape[PM_IN_H] * width, out_width = shape[PM_OUT_W];
    const int32_t out_plane = shape[PM_OUT_H] * out_width;
    const int32_t taps_w = shape[PM_WINDOW_W], window = shape[PM_WINDOW_H] * taps_w, filter = pm_filter(shape);
    for (int32_t tap = 0; tap < window; tap++) {
        const int32_t offset_h = tap / taps_w * shape[PM_DILATION_H] - shape[PM_PAD_H];
        const int32_t offset_w = tap % taps_w * shape[PM_DILATION_W] - shape[PM_PAD_W];
        int32_t end_h, end_w;
        const int32_t row = pm_places(offset_h, shape[PM_STRIDE_H], shape[PM_IN_H], shape[PM_OUT_H], &end_h);
        const int32_t column = pm_places(offset_w, shape[PM_STRIDE_W], width, out_width, &end_w);
        pm_tap t = {.batch = batch,
                    .rows = end_h - row,
                    .columns = end_w - column,
                    .x_batch = x_step,
                    .x_row = shape[PM_STRIDE_H] * width,
                    .x_step = shape[PM_STRIDE_W],
                    .x_channel = plane,
                    .y_batch = dy_step,
                    .y_row = out_width,
                    .y_channel = out_plane};
        if (t.rows > 0 && t.columns == out_width && t.x_row == t.columns && t.x_step == 1) {
            /* Rows without gaps are one long row. */
            t.columns *= t.rows;
            t.rows = 1;
        }
        const int32_t seen = t.rows > 0 && t.columns > 0;
        const int32_t from = seen ? (row * shape[PM_STRIDE_H] + offset_h) * width + column * shape[PM_STRIDE_W] + offset_w
                                  : 0;
        const int32_t back = seen ? row * out_width + column : 0;
        t.rows = seen ? t.rows : 0;
        for (int32_t done = 0; done < count;) {
            const int32_t group = (first + done) / results, left = (group + 1) * results - first - done;
            const int32_t now = left < count - done ? left : count - done;
            pm_dw_tap(&t, dw + done * filter + tap, shape, now, x + group * channels * plane + from,
                      dy + done * out_plane + back, u);
            done += now;
        }
    }
}

#endif
