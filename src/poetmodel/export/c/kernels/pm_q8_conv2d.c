/* A quantized convolution (see pm_q8.h, and pm_conv.h for `shape`, whose last number is not read). w has for each
result rows, columns and channels of its window, those of its group; start is as for pm_q8_pointwise, and zero_x the zero
of x, which also stands for what is outside of the image. */
#include "pm_conv.h"
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_conv2d(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                  const pm_real *bias, const int32_t *shape, int32_t batch, int32_t zero_x, pm_real inverse,
                  int32_t zero, int32_t low, int32_t high)
{
    const pm_real *restrict const scales = scale, *restrict const biases = bias;
    const int32_t *restrict const starts = start;
    const float factor = (float)inverse;
    const int32_t all = shape[PM_IN], channels = all / shape[PM_GROUPS];
    const int32_t results = shape[PM_OUT], of_group = results / shape[PM_GROUPS];
    const int32_t window_row = shape[PM_WINDOW_W] * channels, filter = shape[PM_WINDOW_H] * window_row;
    const int32_t next = shape[PM_DILATION_W] * all, down = shape[PM_DILATION_H] * shape[PM_IN_W] * all;
    const int32_t step = shape[PM_STRIDE_W] * all;
    const int in_line = channels == all && shape[PM_DILATION_W] == 1; /* a row of a window has no gaps */
    const pm_axis rows = {shape[PM_OUT_H], 0, 0, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis columns = {shape[PM_OUT_W], 0, 0, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    int8_t *to = out;
    for (int32_t k = 0; k < batch * rows.places; k++) {
        const int32_t i = k % rows.places * shape[PM_STRIDE_H] - shape[PM_PAD_H];
        const int32_t image = (k / rows.places * shape[PM_IN_H] + i) * shape[PM_IN_W] * all;
        int32_t bottom, right, last;
        const int32_t top = pm_taps(&rows, i, &bottom);
        for (int32_t place = 0; place < columns.places;) {
            const int32_t j = place * shape[PM_STRIDE_W] - shape[PM_PAD_W];
            const int32_t left = pm_taps(&columns, j, &right);
            /* Two places at once where both see whole windows. */
            const int whole = bottom - top == rows.taps && right - left == columns.taps;
            const int both = whole && place + 1 < columns.places &&
                             pm_taps(&columns, j + shape[PM_STRIDE_W], &last) == 0 && last == columns.taps;
            const int32_t runs = in_line ? right > left : right - left;
            const int32_t length = in_line ? (right - left) * channels : channels;
            const int32_t first_w = top * window_row + left * channels;
            const int32_t first_x = image + top * down + j * all + left * next;
            for (int32_t c = 0; c < results;) {
                const int32_t e = c % of_group + 1 < of_group ? c + 1 : c;
                pm_q8_sums s = {0, 0, 0, 0};
                if (both) {
                    s = (pm_q8_sums){starts[c], starts[c], starts[e], starts[e]};
                }
                const int8_t *x_row = x + first_x + c / of_group * channels;
                const int8_t *w_row = w + c * filter + first_w;
                for (int32_t r = top; r < bottom; r++) {
                    const int8_t *p = x_row, *v = w_row;
                    for (int32_t run = runs; run > 0; run--) {
                        if (both) {
                            pm_q8_dots(&s, p, v, length, step, (e - c) * filter);
                        } else {
                            pm_q8_dots_of_one(&s, p, v, v + (e - c) * filter, length, zero_x, 1);
                        }
                        p += next;
                        v += channels;
                    }
                    x_row += down;
                    w_row += window_row;
                }
                const float c_scale = (float)scales[c], c_bias = (float)biases[c];
                const float e_scale = (float)scales[e], e_bias = (float)biases[e];
                if (both) {
                    to[results + c] = pm_q8_result(s.b, c_scale, c_bias, factor, zero);
                    to[results + e] = pm_q8_result(s.d, e_scale, e_bias, factor, zero);
                }
                to[c] = pm_q8_result(s.a, c_scale, c_bias, factor, zero);
                to[e] = pm_q8_result(s.c, e_scale, e_bias, factor, zero);
                c = e + 1;
            }
            place += both ? 2 : 1;
            to += both ? 2 * results : results;
        }
    }
    pm_q8_limit(out, batch * rows.places * columns.places * results, low, high);
}
