/* A quantized convolution in which each result sees the channel of its number; arguments as for pm_q8_conv2d, but
weights lie with the channels last, too: rows and columns of the window, channels. */
#include "pm_conv.h"
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_depthwise(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                     const pm_real *bias, const int32_t *shape, int32_t batch, int32_t zero_x, pm_real inverse,
                     int32_t zero, int32_t low, int32_t high)
{
    const pm_real *restrict const scales = scale, *restrict const biases = bias;
    const int32_t *restrict const starts = start;
    const float factor = (float)inverse;
    const int32_t channels = shape[PM_IN], window_row = shape[PM_WINDOW_W] * channels;
    const int32_t next = shape[PM_DILATION_W] * channels, down = shape[PM_DILATION_H] * shape[PM_IN_W] * channels;
    const pm_axis rows = {shape[PM_OUT_H], 0, 0, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis columns = {shape[PM_OUT_W], 0, 0, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    int8_t *to = out;
    for (int32_t k = 0; k < batch * rows.places; k++) {
        const int32_t i = k % rows.places * shape[PM_STRIDE_H] - shape[PM_PAD_H];
        const int32_t image = (k / rows.places * shape[PM_IN_H] + i) * shape[PM_IN_W] * channels;
        int32_t bottom, right;
        const int32_t top = pm_taps(&rows, i, &bottom);
        for (int32_t place = 0; place < columns.places; place++) {
            const int32_t j = place * shape[PM_STRIDE_W] - shape[PM_PAD_W];
            const int32_t left = pm_taps(&columns, j, &right);
            const int whole = bottom - top == rows.taps && right - left == columns.taps;
            const int32_t from = whole ? 0 : zero_x;
            const int8_t *x_first = x + (image + top * down + j * channels + left * next);
            const int8_t *w_first = w + top * window_row + left * channels;
            for (int32_t c = 0; c < channels; c++) {
                int32_t sum = whole ? starts[c] : 0;
                for (int32_t r = 0; r < bottom - top; r++) {
                    const int8_t *p = x_first + c + r * down, *v = w_first + c + r * window_row;
                    for (int32_t t = right - left; t > 0; t--) {
                        sum += (*p - from) * *v;
                        p += next;
                        v += channels;
                    }
                }
                *to++ = pm_q8_result(sum, (float)scales[c], (float)biases[c], factor, zero);
            }
        }
    }
    pm_q8_limit(out, batch * rows.places * columns.places * channels, low, high);
}
