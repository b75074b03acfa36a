/* The gradient of the input of a quantized convolution (see pm_q8_gradients.h, and pm_conv.h for `shape`): w has
results, rows, columns and channels of a group. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

/* Adds to 4 channels of a pixel what the results of a place that sees it give. */
static PM_OUT_OF_LINE void pm_q8_dx_of_place(pm_real *out, const pm_real *gradient, const int8_t *w,
                                             const pm_real *scale, int32_t results, int32_t filter)
{
    pm_real a = out[0], b = out[1], c = out[2], d = out[3];
    for (; results > 0; results--) {
        const pm_real g = *gradient++ * *scale++;
        a += g * (pm_real)w[0], b += g * (pm_real)w[1], c += g * (pm_real)w[2], d += g * (pm_real)w[3];
        w += filter;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

void pm_q8_conv2d_dx(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale, const int32_t *shape,
                     int32_t batch)
{
    const int32_t groups = shape[PM_GROUPS], channels = shape[PM_IN] / groups, results = shape[PM_OUT] / groups;
    const int32_t filter = shape[PM_WINDOW_H] * shape[PM_WINDOW_W] * channels, width = shape[PM_IN_W];
    const int32_t of_rows = pm_q8_between(shape[PM_STRIDE_H], shape[PM_DILATION_H]);
    const int32_t of_columns = pm_q8_between(shape[PM_STRIDE_W], shape[PM_DILATION_W]);
    for (int32_t row = 0; row < batch * shape[PM_IN_H]; row++) {
        const pm_real *image = gradient + row / shape[PM_IN_H] * shape[PM_OUT_H] * shape[PM_OUT_W] * shape[PM_OUT];
        const pm_q8_reach down = pm_q8_rows_reached(shape, row % shape[PM_IN_H], of_rows);
        for (int32_t j = 0; j < width; j++) {
            const pm_q8_reach across = pm_q8_columns_reached(shape, j, of_columns);
            for (int32_t c = 0; c < groups * channels; c++) {
                out[c] = 0;
            }
            for (int32_t h = 0; h < down.taps; h++) {
                for (int32_t v = 0; v < across.taps; v++) {
                    const int32_t tap_row = down.tap + h * down.tap_step, row_seen = down.place + h * down.place_step;
                    const int32_t tap = tap_row * shape[PM_WINDOW_W] + across.tap + v * across.tap_step;
                    const int32_t place = row_seen * shape[PM_OUT_W] + across.place + v * across.place_step;
                    for (int32_t g = 0; g < groups; g++) {
                        const pm_real *from = image + place * shape[PM_OUT] + g * results, *by = scale + g * results;
                        const int8_t *weight = w + g * results * filter + tap * channels;
                        pm_real *to = out + g * channels;
                        int32_t c = 0;
                        for (; c + 4 <= channels; c += 4) {
                            pm_q8_dx_of_place(to + c, from, weight + c, by, results, filter);
                        }
                        for (; c < channels; c++) {
                            pm_real sum = to[c];
                            for (int32_t k = 0; k < results; k++) {
                                sum += from[k] * by[k] * (pm_real)weight[k * filter + c];
                            }
                            to[c] = sum;
                        }
                    }
                }
            }
            out += groups * channels;
        }
    }
}
