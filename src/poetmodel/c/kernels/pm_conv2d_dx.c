/* The gradient of a convolution's input: dx = sum over output channels first .. first + count - 1 of dy and w (see
   pm_conv.h). dy_step is the batch stride of dy. With accumulate, sums start with the values in dx, so that calls
   for ranges of channels in their order give the bits of one call for all; otherwise all of dx is written, zeros if
   no output channel reaches an element. It is also a transposed convolution, from dy to dx. */
#include "pm_correlate.h"
#include "pm_kernels.h"

/* Sets `axis` to the positions i, i + stride, … of the input, which use the same taps, and *between to the distance of
   these taps in the window. Returns the first of these taps. */
static int32_t pm_phase(pm_axis *axis, int32_t i, int32_t stride, int32_t dilation, int32_t window, int32_t pad,
                        int32_t in, int32_t out, int32_t *between)
{
    int32_t tap = 0;
    while (tap < window && tap < stride && (i + pad - tap * dilation) % stride != 0) {
        tap++;
    }
    *between = 1;
    while ((*between * dilation) % stride != 0) {
        (*between)++;
    }
    const int32_t reached = tap < window && tap < stride;
    axis->places = (in - i + stride - 1) / stride;
    axis->start = reached ? (i + pad - tap * dilation) / stride : 0;
    axis->step = 1;
    axis->size = out;
    axis->taps = reached ? (window - tap + *between - 1) / *between : 0;
    axis->tap_step = -(*between * dilation) / stride;
    return tap;
}

static void pm_group(pm_real *dx, const pm_real *dy, const pm_real *w, const int32_t *shape, int32_t sum,
                     int32_t accumulate)
{
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS], filter = pm_filter(shape);
    const int32_t plane = shape[PM_IN_H] * shape[PM_IN_W], out_plane = shape[PM_OUT_H] * shape[PM_OUT_W];
    const int32_t window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    pm_correlation c = {.channels = sum,
                        .x_channel = out_plane,
                        .x_row = shape[PM_OUT_W],
                        .w_channel = filter,
                        .w_result = window,
                        .out_channel = plane,
                        .accumulate = accumulate};
    const int32_t stride_h = shape[PM_STRIDE_H], stride_w = shape[PM_STRIDE_W];
    /* The output padding of a transposed convolution can be as wide as its dilation: no pixel reaches its end. */
    const int32_t reached = shape[PM_IN_H] <= shape[PM_OUT_H] * stride_h && shape[PM_IN_W] <= shape[PM_OUT_W] * stride_w;
    const int32_t pointwise = window == 1 && shape[PM_PAD_H] == 0 && shape[PM_PAD_W] == 0 && reached;
    if (pointwise && stride_h == 1 && stride_w == 1) {
        /* Windows of one pixel: a single row, with channels as taps. */
        c.down = (pm_axis){1, 0, 1, 1, 1, 1};
        c.across = (pm_axis){plane, 0, 1, sum * plane, sum, plane};
        c.channels = 1;
        c.w_across = filter;
        c.out_step = 1;
        pm_correlate(&c, dx, dy, w, 0, channels, 0, -1);
        return;
    }
    for (int32_t i = 0; i < stride_h && i < shape[PM_IN_H]; i++) {
        int32_t between;
        const int32_t tap_h = pm_phase(&c.down, i, stride_h, shape[PM_DILATION_H], shape[PM_WINDOW_H],
                                       shape[PM_PAD_H], shape[PM_IN_H], shape[PM_OUT_H], &between);
        c.w_down = between * shape[PM_WINDOW_W];
        c.out_row = stride_h * shape[PM_IN_W];
        for (int32_t j = 0; j < stride_w && j < shape[PM_IN_W]; j++) {
            const int32_t tap_w = pm_phase(&c.across, j, stride_w, shape[PM_DILATION_W], shape[PM_WINDOW_W],
                                           shape[PM_PAD_W], shape[PM_IN_W], shape[PM_OUT_W], &c.w_across);
            c.out_step = stride_w;
            c.channels = c.down.taps > 0 && c.across.taps > 0 ? sum : 0;
            if (pointwise && c.channels > 0) {
                c.across.size = sum * out_plane;
                c.across.taps = sum;
                c.across.tap_step = out_plane;
                c.w_across = filter;
                c.channels = 1;
            }
            pm_correlate(&c, dx + i * shape[PM_IN_W] + j, dy, w + tap_h * shape[PM_WINDOW_W] + tap_w, 0, channels, 0, -1);
        }
    }
}

void pm_conv2d_dx(pm_real *dx, const pm_real *dy, const pm_real *w, const int32_t *shape, int32_t batch, int32_t first,
                  int32_t count, int32_t dy_step, int32_t accumulate)
{
    const int32_t groups = shape[PM_GROUPS], channels = shape[PM_IN] / groups, results = shape[PM_OUT] / groups;
    const int32_t plane = shape[PM_IN_H] * shape[PM_IN_W], out_plane = shape[PM_OUT_H] * shape[PM_OUT_W];
    const int32_t filter = pm_filter(shape);
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t g = 0; g < groups; g++) {
            int32_t begin = g * results - first, end = begin + results;
            begin = begin < 0 ? 0 : begin;
            end = end < count ? end : count;
            if (end > begin) {
                pm_group(dx, dy + begin * out_plane, w + begin * filter, shape, end - begin, accumulate);
            } else if (!accumulate) {
                for (int32_t i = 0; i < channels * plane; i++) {
                    dx[i] = 0;
                }
            }
            dx += channels * plane;
        }
        dy += dy_step;
    }
}
