/* As pm_conv2d_dw, for tensors with any strides: `strides` are the four strides of dw, of x and of dy. */
#include "pm_conv.h"
#include "pm_kernels.h"

static pm_real pm_one_weight(const pm_real *x, const pm_real *dy, const int32_t *shape, const int32_t *strides,
                             int32_t batch, int32_t offset_h, int32_t offset_w)
{
    const int32_t *xs = strides + 4, *ys = strides + 8;
    const int32_t step = shape[PM_STRIDE_W] * xs[3];
    int32_t end_h, end_w;
    const int32_t row = pm_places(offset_h, shape[PM_STRIDE_H], shape[PM_IN_H], shape[PM_OUT_H], &end_h);
    const int32_t column = pm_places(offset_w, shape[PM_STRIDE_W], shape[PM_IN_W], shape[PM_OUT_W], &end_w);
    pm_real sum = 0;
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t i = row; i < end_h; i++) {
            const pm_real *p = x + n * xs[0] + (i * shape[PM_STRIDE_H] + offset_h) * xs[2];
            const pm_real *q = dy + n * ys[0] + i * ys[2] + column * ys[3];
            p += (column * shape[PM_STRIDE_W] + offset_w) * xs[3];
            for (int32_t j = column; j < end_w; j++) {
                sum += *p * *q;
                p += step;
                q += ys[3];
            }
        }
    }
    return sum;
}

void pm_conv2d_dw_strided(pm_real *dw, const pm_real *x, const pm_real *dy, const int32_t *shape,
                          const int32_t *strides, int32_t batch, int32_t first, int32_t count)
{
    const int32_t *xs = strides + 4, *ys = strides + 8;
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS], results = shape[PM_OUT] / shape[PM_GROUPS];
    const int32_t taps = shape[PM_WINDOW_W], window = shape[PM_WINDOW_H] * taps;
    for (int32_t o = 0; o < count; o++) {
        for (int32_t i = 0; i < channels * window; i++) {
            const int32_t c = i / window, h = i % window / taps, v = i % taps;
            dw[o * strides[0] + c * strides[1] + h * strides[2] + v * strides[3]] =
                pm_one_weight(x + ((first + o) / results * channels + c) * xs[1], dy + o * ys[1], shape, strides,
                              batch, h * shape[PM_DILATION_H] - shape[PM_PAD_H],
                              v * shape[PM_DILATION_W] - shape[PM_PAD_W]);
        }
    }
}
