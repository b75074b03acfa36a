/* As pm_conv2d_dx, for tensors with any strides: `strides` are the four strides of dx, of dy and of w. */
#include "pm_conv.h"
#include "pm_kernels.h"

/* Adds the products of output channel o with one tap of the window, at the positions inside the input. */
static void pm_spread(pm_real *dx, const pm_real *dy, pm_real w, const int32_t *shape, const int32_t *strides,
                       int32_t offset_h, int32_t offset_w)
{
    int32_t end_h, end_w;
    const int32_t row = pm_places(offset_h, shape[PM_STRIDE_H], shape[PM_IN_H], shape[PM_OUT_H], &end_h);
    const int32_t column = pm_places(offset_w, shape[PM_STRIDE_W], shape[PM_IN_W], shape[PM_OUT_W], &end_w);
    const int32_t step = shape[PM_STRIDE_W] * strides[3];
    for (int32_t i = row; i < end_h; i++) {
        pm_real *to = dx + (i * shape[PM_STRIDE_H] + offset_h) * strides[2];
        const pm_real *from = dy + i * strides[6] + column * strides[7];
        to += (column * shape[PM_STRIDE_W] + offset_w) * strides[3];
        for (int32_t j = column; j < end_w; j++) {
            *to += *from * w;
            to += step;
            from += strides[7];
        }
    }
}

void pm_conv2d_dx_strided(pm_real *dx, const pm_real *dy, const pm_real *w, const int32_t *shape,
                          const int32_t *strides, int32_t batch, int32_t first, int32_t count, int32_t accumulate)
{
    const int32_t *ys = strides + 4, *ws = strides + 8;
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS], results = shape[PM_OUT] / shape[PM_GROUPS];
    const int32_t width = shape[PM_IN_W], taps = shape[PM_WINDOW_W], window = shape[PM_WINDOW_H] * taps;
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t i = 0; !accumulate && i < shape[PM_IN] * shape[PM_IN_H] * width; i++) {
            const int32_t line = i / width, row = line % shape[PM_IN_H], channel = line / shape[PM_IN_H];
            dx[n * strides[0] + channel * strides[1] + row * strides[2] + i % width * strides[3]] = 0;
        }
        for (int32_t o = 0; o < count; o++) {
            pm_real *group = dx + n * strides[0] + (first + o) / results * channels * strides[1];
            for (int32_t i = 0; i < channels * window; i++) {
                const int32_t c = i / window, h = i % window / taps, v = i % taps;
                pm_spread(group + c * strides[1], dy + n * ys[0] + o * ys[1],
                           w[o * ws[0] + c * ws[1] + h * ws[2] + v * ws[3]], shape, strides,
                           h * shape[PM_DILATION_H] - shape[PM_PAD_H], v * shape[PM_DILATION_W] - shape[PM_PAD_W]);
            }
        }
    }
}
