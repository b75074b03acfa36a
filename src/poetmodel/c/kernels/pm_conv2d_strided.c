/* As pm_conv2d, for tensors with any strides: `strides` are the four strides of out, of x and of w. */
#include "pm_conv.h"
#include "pm_kernels.h"

void pm_conv2d_strided(pm_real *out, const pm_real *x, const pm_real *w, const pm_real *bias, const int32_t *shape,
                       const int32_t *strides, int32_t batch, int32_t first, int32_t count)
{
    const int32_t *xs = strides + 4, *ws = strides + 8;
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS], results = shape[PM_OUT] / shape[PM_GROUPS];
    const pm_axis down = {shape[PM_OUT_H], 0, 0, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis across = {shape[PM_OUT_W], 0, 0, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    const int32_t tap = across.tap_step * xs[3];
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t o = 0; o < count; o++) {
            const pm_real *group = x + n * xs[0] + (first + o) / results * channels * xs[1];
            for (int32_t place = 0; place < down.places * across.places; place++) {
                const int32_t i = place / across.places, j = place % across.places;
                const int32_t row = i * shape[PM_STRIDE_H] - shape[PM_PAD_H];
                const int32_t column = j * shape[PM_STRIDE_W] - shape[PM_PAD_W];
                int32_t end_h, end_w;
                const int32_t h = pm_taps(&down, row, &end_h), v = pm_taps(&across, column, &end_w);
                pm_real sum = bias ? bias[o] : 0;
                for (int32_t c = 0; c < channels; c++) {
                    for (int32_t y = h; y < end_h; y++) {
                        const pm_real *p = group + c * xs[1] + (row + y * down.tap_step) * xs[2];
                        const pm_real *q = w + o * ws[0] + c * ws[1] + y * ws[2] + v * ws[3];
                        p += (column + v * across.tap_step) * xs[3];
                        for (int32_t z = v; z < end_w; z++) {
                            sum += *p * *q;
                            p += tap;
                            q += ws[3];
                        }
                    }
                }
                out[n * strides[0] + o * strides[1] + i * strides[2] + j * strides[3]] = sum;
            }
        }
    }
}
