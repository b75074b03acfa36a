/* The gradient of the input x of pm_q8_maximum with result y: the first largest element of each window gets it (see
   pm_q8_gradients.h, and pm_conv.h for `shape`). It has `count` channels; `shape` has those of a pixel of out and of
   the gradient, pixels of x have x_step, of y y_step. Windows are processed from last to first, so that sums have
   the order of the taps of an element. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_maximum_dx(pm_real *out, const pm_real *gradient, const int8_t *x, const int8_t *y, const int32_t *shape,
                      int32_t batch, int32_t count, int32_t x_step, int32_t y_step)
{
    const int32_t pixels = shape[PM_IN_H] * shape[PM_IN_W], places = shape[PM_OUT_H] * shape[PM_OUT_W];
    const int32_t step = shape[PM_IN], of_place = shape[PM_OUT];
    const pm_axis rows = {1, 0, 1, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis columns = {1, 0, 1, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t p = 0; p < pixels; p++) {
            for (int32_t c = 0; c < count; c++) {
                out[p * step + c] = 0;
            }
        }
        for (int32_t place = places - 1; place >= 0; place--) {
            const int32_t i = place / shape[PM_OUT_W] * shape[PM_STRIDE_H] - shape[PM_PAD_H];
            const int32_t j = place % shape[PM_OUT_W] * shape[PM_STRIDE_W] - shape[PM_PAD_W];
            int32_t bottom, right;
            const int32_t top = pm_taps(&rows, i, &bottom), left = pm_taps(&columns, j, &right);
            for (int32_t c = 0; c < count; c++) {
                const int8_t best = y[place * y_step + c];
                int32_t found = -1;
                for (int32_t h = top; h < bottom && found < 0; h++) {
                    for (int32_t v = left; v < right && found < 0; v++) {
                        const int32_t at = (i + h * rows.tap_step) * shape[PM_IN_W] + j + v * columns.tap_step;
                        found = x[at * x_step + c] == best ? at : -1;
                    }
                }
                if (found >= 0) {
                    out[found * step + c] += gradient[place * of_place + c];
                }
            }
        }
        out += pixels * step, x += pixels * x_step;
        gradient += places * of_place, y += places * y_step;
    }
}
