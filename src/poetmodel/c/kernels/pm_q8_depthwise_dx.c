/* The gradient of `count` channels of the input of a quantized depthwise convolution (see pm_q8_gradients.h, and
   pm_conv.h for `shape`, whose channels are those of a pixel of out, and of the gradient). w has rows, columns and
   channels; their number is the last number of `shape` if it differs from `count`. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

/* Computes 4 channels of a pixel. */
static PM_OUT_OF_LINE void pm_q8_dx_each(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale,
                                         const pm_q8_seen *seen)
{
    const pm_real s0 = scale[0], s1 = scale[1], s2 = scale[2], s3 = scale[3];
    pm_real a = 0, b = 0, c = 0, d = 0;
    for (int32_t h = 0; h < seen->rows; h++) {
        const pm_real *from = gradient + h * seen->down;
        const int8_t *weight = w + h * seen->w_down;
        for (int32_t v = seen->columns; v > 0; v--) {
            a += from[0] * s0 * (pm_real)weight[0];
            b += from[1] * s1 * (pm_real)weight[1];
            c += from[2] * s2 * (pm_real)weight[2];
            d += from[3] * s3 * (pm_real)weight[3];
            from += seen->across, weight += seen->w_across;
        }
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

void pm_q8_depthwise_dx(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale,
                        const int32_t *shape, int32_t batch, int32_t count)
{
    const int32_t step = shape[PM_OUT], of_image = shape[PM_OUT_H] * shape[PM_OUT_W] * step;
    const int32_t tap = shape[PM_FILTER] ? shape[PM_FILTER] : count;
    const int32_t of_rows = pm_q8_between(shape[PM_STRIDE_H], shape[PM_DILATION_H]);
    const int32_t of_columns = pm_q8_between(shape[PM_STRIDE_W], shape[PM_DILATION_W]);
    for (int32_t row = 0; row < batch * shape[PM_IN_H]; row++) {
        const pm_real *image = gradient + row / shape[PM_IN_H] * of_image;
        const pm_q8_reach down = pm_q8_rows_reached(shape, row % shape[PM_IN_H], of_rows);
        for (int32_t j = 0; j < shape[PM_IN_W]; j++) {
            const pm_q8_reach across = pm_q8_columns_reached(shape, j, of_columns);
            const pm_q8_seen seen = pm_q8_seen_by(shape, &down, &across, step, tap);
            const pm_real *from = image + seen.first;
            const int8_t *weight = w + seen.w_first;
            int32_t c = 0;
            for (; c + 4 <= count; c += 4) {
                pm_q8_dx_each(out + c, from + c, weight + c, scale + c, &seen);
            }
            for (; c < count; c++) {
                pm_real sum = 0;
                for (int32_t h = 0; h < seen.rows; h++) {
                    for (int32_t v = 0; v < seen.columns; v++) {
                        sum += from[c + h * seen.down + v * seen.across] * scale[c] *
                               (pm_real)weight[c + h * seen.w_down + v * seen.w_across];
                    }
                }
                out[c] = sum;
            }
            out += shape[PM_IN];
        }
    }
}
