/* Common code of depthwise convolutions, whose output channels have one input channel. Each tap of the window is
   applied to all channels before the next, so that its position in the image is computed once. */
#ifndef PM_DEPTHWISE_H
#define PM_DEPTHWISE_H

#include "pm_conv.h"

/* The positions of one tap in the image. */
typedef struct {
    int32_t rows, columns;
    int32_t x;   /* offset of its first element in a channel of x */
    int32_t out; /* offset of the first result in a channel of the output */
} pm_seen;

static inline pm_seen pm_tap_seen(const int32_t *shape, int32_t tap)
{
    const int32_t offset_h = tap / shape[PM_WINDOW_W] * shape[PM_DILATION_H] - shape[PM_PAD_H];
    const int32_t offset_w = tap % shape[PM_WINDOW_W] * shape[PM_DILATION_W] - shape[PM_PAD_W];
    int32_t end_h, end_w;
    const int32_t row = pm_places(offset_h, shape[PM_STRIDE_H], shape[PM_IN_H], shape[PM_OUT_H], &end_h);
    const int32_t column = pm_places(offset_w, shape[PM_STRIDE_W], shape[PM_IN_W], shape[PM_OUT_W], &end_w);
    if (row == end_h || column == end_w) {
        return (pm_seen){0, 0, 0, 0};
    }
    return (pm_seen){end_h - row, end_w - column,
                     (row * shape[PM_STRIDE_H] + offset_h) * shape[PM_IN_W] + column * shape[PM_STRIDE_W] + offset_w,
                     row * shape[PM_OUT_W] + column};
}

/* Returns whether windows are 3 x 3 with stride 1 and padding 1, for which a faster function exists. */
static inline int32_t pm_is_same_3x3(const int32_t *shape)
{
    return shape[PM_WINDOW_H] == 3 && shape[PM_WINDOW_W] == 3 && shape[PM_STRIDE_H] == 1 && shape[PM_STRIDE_W] == 1 &&
           shape[PM_PAD_H] == 1 && shape[PM_PAD_W] == 1 && shape[PM_DILATION_H] == 1 && shape[PM_DILATION_W] == 1;
}

#define PM_LOAD_THREE(x, j) x##0 = top[j], x##1 = middle[j], x##2 = bottom[j]
#define PM_WINDOW_SUM(x, y, z)                                                                                     \
    (x##0 * w00 + y##0 * w01 + z##0 * w02 + x##1 * w10 + y##1 * w11 + z##1 * w12 + x##2 * w20 + y##2 * w21 + \
     z##2 * w22)

/* One row: to += windows of three rows, with weights w[0], w[step], …, w[8 * step]; rows outside are zeros. */
static inline void pm_add_row_3x3(pm_real *to, const pm_real *x, const pm_real *w, const int32_t step, int32_t row,
                                  int32_t height, int32_t width)
{
    const int32_t above = row > 0, below = row + 1 < height;
    const pm_real *middle = x + row * width;
    const pm_real *top = above ? middle - width : middle, *bottom = below ? middle + width : middle;
    const pm_real w00 = above ? w[0] : 0, w01 = above ? w[step] : 0, w02 = above ? w[2 * step] : 0;
    const pm_real w10 = w[3 * step], w11 = w[4 * step], w12 = w[5 * step];
    const pm_real w20 = below ? w[6 * step] : 0, w21 = below ? w[7 * step] : 0, w22 = below ? w[8 * step] : 0;
    pm_real a0 = 0, a1 = 0, a2 = 0, b0, b1, b2, c0, c1, c2;
    PM_LOAD_THREE(b, 0);
    for (; width > 3; width -= 3) {
        PM_LOAD_THREE(c, 1);
        to[0] += PM_WINDOW_SUM(a, b, c);
        PM_LOAD_THREE(a, 2);
        to[1] += PM_WINDOW_SUM(b, c, a);
        PM_LOAD_THREE(b, 3);
        to[2] += PM_WINDOW_SUM(c, a, b);
        to += 3, top += 3, middle += 3, bottom += 3;
    }
    for (; width > 1; width--) {
        PM_LOAD_THREE(c, 1);
        *to++ += PM_WINDOW_SUM(a, b, c);
        a0 = b0, a1 = b1, a2 = b2, b0 = c0, b1 = c1, b2 = c2;
        top++, middle++, bottom++;
    }
    c0 = c1 = c2 = 0;
    *to += PM_WINDOW_SUM(a, b, c);
}

/* to[i * to_step] += w * from[i * from_step] */
static inline void pm_add_scaled(pm_real *to, const int32_t to_step, const pm_real *from, const int32_t from_step,
                                 pm_real w, int32_t n)
{
    for (; n >= 4; n -= 4) {
        to[0] += w * from[0];
        to[to_step] += w * from[from_step];
        to[2 * to_step] += w * from[2 * from_step];
        to[3 * to_step] += w * from[3 * from_step];
        to += 4 * to_step;
        from += 4 * from_step;
    }
    for (; n > 0; n--) {
        *to += w * *from;
        to += to_step;
        from += from_step;
    }
}

#endif
