/* The gradient of the input of pm_q8_average: each element gets an equal fraction of the gradient of each window
   with it (see pm_q8_gradients.h, and pm_conv.h for `shape`). It has `count` channels; `shape` has the channels of a
   pixel of out, and of the gradient. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_average_dx(pm_real *out, const pm_real *gradient, const int32_t *shape, int32_t batch, int32_t count)
{
    const int32_t step = shape[PM_OUT], line = shape[PM_OUT_W] * step;
    const pm_real elements = (pm_real)(shape[PM_WINDOW_H] * shape[PM_WINDOW_W]);
    for (int32_t row = 0; row < batch * shape[PM_IN_H]; row++) {
        const pm_real *image = gradient + row / shape[PM_IN_H] * shape[PM_OUT_H] * line;
        const pm_q8_reach down = pm_q8_rows_reached(shape, row % shape[PM_IN_H], shape[PM_STRIDE_H]);
        for (int32_t j = 0; j < shape[PM_IN_W]; j++) {
            const pm_q8_reach across = pm_q8_columns_reached(shape, j, shape[PM_STRIDE_W]);
            for (int32_t c = 0; c < count; c++) {
                pm_real sum = 0;
                for (int32_t h = 0; h < down.taps; h++) {
                    const pm_real *from = image + (down.place + h * down.place_step) * line + c;
                    for (int32_t v = 0; v < across.taps; v++) {
                        sum += from[(across.place + v * across.place_step) * step] / elements;
                    }
                }
                out[c] = sum;
            }
            out += shape[PM_IN];
        }
    }
}
