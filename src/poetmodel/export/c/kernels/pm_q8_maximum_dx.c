/* The gradient of the input x of the largest elements y of windows of a quantized tensor: the first of each window that
is as large gets it (see pm_q8_gradients.h, and pm_conv.h for `shape`). Windows come last first, so that the sums have the
order of the taps of an element. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_maximum_dx(pm_real *out, const pm_real *gradient, const int8_t *x, const int8_t *y, const int32_t *shape,
                      int32_t batch)
{
    const int32_t channels = shape[PM_IN], x_line = shape[PM_IN_W] * channels, line = shape[PM_OUT_W] * channels;
    const pm_axis rows = {1, 0, 1, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis columns = {1, 0, 1, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t k = 0; k < shape[PM_IN_H] * x_line; k++) {
            out[k] = 0;
        }
        for (int32_t place = shape[PM_OUT_H] * shape[PM_OUT_W] - 1; place >= 0; place--) {
            const int32_t i = place / shape[PM_OUT_W] * shape[PM_STRIDE_H] - shape[PM_PAD_H];
            const int32_t j = place % shape[PM_OUT_W] * shape[PM_STRIDE_W] - shape[PM_PAD_W];
            int32_t bottom, right;
            const int32_t top = pm_taps(&rows, i, &bottom), left = pm_taps(&columns, j, &right);
            for (int32_t c = 0; c < channels; c++) {
                const int8_t best = y[place * channels + c];
                int32_t found = -1;
                for (int32_t h = top; h < bottom && found < 0; h++) {
                    for (int32_t v = left; v < right && found < 0; v++) {
                        const int32_t at = (i + h * rows.tap_step) * x_line + (j + v * columns.tap_step) * channels + c;
                        found = x[at] == best ? at : -1;
                    }
                }
                if (found >= 0) {
                    out[found] += gradient[place * channels + c];
                }
            }
        }
        out += shape[PM_IN_H] * x_line, x += shape[PM_IN_H] * x_line;
        gradient += shape[PM_OUT_H] * line, y += shape[PM_OUT_H] * line;
    }
}
