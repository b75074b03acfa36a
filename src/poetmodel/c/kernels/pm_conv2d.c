/* A convolution: out = x * w + bias for the output channels first .. first + count - 1 (see pm_conv.h). bias may be
   0 (none); out_step is the batch stride of the output. With accumulate, sums start with the values in out: calls
   for ranges of input channels in their order give the bits of one call for all. */
#include "pm_correlate.h"
#include "pm_kernels.h"

void pm_conv2d(pm_real *out, const pm_real *x, const pm_real *w, const pm_real *bias, const int32_t *shape,
               int32_t batch, int32_t first, int32_t count, int32_t out_step, int32_t accumulate)
{
    const int32_t groups = shape[PM_GROUPS], channels = shape[PM_IN] / groups, results = shape[PM_OUT] / groups;
    const int32_t plane = shape[PM_IN_H] * shape[PM_IN_W], out_plane = shape[PM_OUT_H] * shape[PM_OUT_W];
    const int32_t window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    pm_correlation c = {
        .down = {shape[PM_OUT_H], -shape[PM_PAD_H], shape[PM_STRIDE_H], shape[PM_IN_H], shape[PM_WINDOW_H],
                 shape[PM_DILATION_H]},
        .across = {shape[PM_OUT_W], -shape[PM_PAD_W], shape[PM_STRIDE_W], shape[PM_IN_W], shape[PM_WINDOW_W],
                   shape[PM_DILATION_W]},
        .channels = channels,
        .x_channel = plane,
        .x_row = shape[PM_IN_W],
        .w_channel = window,
        .w_down = shape[PM_WINDOW_W],
        .w_across = 1,
        .w_result = pm_filter(shape),
        .out_channel = out_plane,
        .out_row = shape[PM_OUT_W],
        .out_step = 1,
        .accumulate = accumulate,
    };
    if (window == 1 && shape[PM_PAD_H] == 0 && shape[PM_PAD_W] == 0) {
        /* Windows of one pixel: channels are the taps, and all pixels are one row unless strides skip some. */
        c.across.size = channels * plane;
        c.across.taps = channels;
        c.across.tap_step = plane;
        c.channels = 1;
        /* The gradient of a transposed convolution with output padding skips pixels at the end. */
        if (shape[PM_STRIDE_H] == 1 && shape[PM_STRIDE_W] == 1 && plane == out_plane) {
            c.down.places = 1;
            c.across.places = plane;
        }
    }
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t done = 0; done < count;) {
            const int32_t group = (first + done) / results, left = (group + 1) * results - first - done;
            const int32_t now = left < count - done ? left : count - done;
            pm_correlate(&c, out + done * out_plane, x + group * channels * plane, w + done * c.w_result,
                         bias ? bias + done : bias, now, 1, 1);
            done += now;
        }
        out += out_step;
        x += shape[PM_IN] * plane;
    }
}
