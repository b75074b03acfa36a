/* The gradient of `channels` channels of the input of a quantized convolution (see pm_q8_gradients.h): sums over
   `results` channels of its result. `shape` (see pm_conv.h) is that of the layer, whose w has results, rows, columns
   and channels of a group. Pointers are to the first channel and the first result; with groups, a call has all of
   both. Pixels are `out_step` and `gradient_step` elements apart. With `adds`, sums start with out, otherwise with
   0. Each sum processes 4 results at a time, for these each position that uses the pixel, and for this each result:
   a sum that continues after a multiple of 4 results has the bits of a single sum. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

/* Sums of 4 channels of a pixel, starting with those at `begin`. */
static PM_OUT_OF_LINE void pm_q8_dx_of_pixel(pm_real *out, const pm_real *begin, const pm_real *gradient,
                                             const int8_t *w, const pm_real *scale, const pm_q8_seen *seen,
                                             int32_t results, int32_t filter)
{
    pm_real a = begin[0], b = begin[1], c = begin[2], d = begin[3];
    for (; results >= 4; results -= 4, gradient += 4, scale += 4, w += 4 * filter) {
        const pm_real s0 = scale[0], s1 = scale[1], s2 = scale[2], s3 = scale[3];
        for (int32_t h = 0; h < seen->rows; h++) {
            const pm_real *from = gradient + h * seen->down;
            const int8_t *weight = w + h * seen->w_down;
            for (int32_t v = seen->columns; v > 0; v--) {
                const int8_t *next = weight;
                pm_real g = from[0] * s0;
                a += g * (pm_real)next[0], b += g * (pm_real)next[1];
                c += g * (pm_real)next[2], d += g * (pm_real)next[3];
                next += filter, g = from[1] * s1;
                a += g * (pm_real)next[0], b += g * (pm_real)next[1];
                c += g * (pm_real)next[2], d += g * (pm_real)next[3];
                next += filter, g = from[2] * s2;
                a += g * (pm_real)next[0], b += g * (pm_real)next[1];
                c += g * (pm_real)next[2], d += g * (pm_real)next[3];
                next += filter, g = from[3] * s3;
                a += g * (pm_real)next[0], b += g * (pm_real)next[1];
                c += g * (pm_real)next[2], d += g * (pm_real)next[3];
                from += seen->across, weight += seen->w_across;
            }
        }
    }
    for (int32_t h = 0; results > 0 && h < seen->rows; h++) {
        for (int32_t v = 0; v < seen->columns; v++) {
            const pm_real *from = gradient + h * seen->down + v * seen->across;
            const int8_t *weight = w + h * seen->w_down + v * seen->w_across;
            for (int32_t k = 0; k < results; k++, weight += filter) {
                const pm_real g = from[k] * scale[k];
                a += g * (pm_real)weight[0], b += g * (pm_real)weight[1];
                c += g * (pm_real)weight[2], d += g * (pm_real)weight[3];
            }
        }
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* Sum of one channel. */
static inline pm_real pm_q8_dx_of_one(pm_real sum, const pm_real *gradient, const int8_t *w, const pm_real *scale,
                                      const pm_q8_seen *seen, int32_t results, int32_t filter)
{
    for (int32_t first = 0; first < results; first += 4) {
        const int32_t end = PM_MIN(first + 4, results);
        for (int32_t h = 0; h < seen->rows; h++) {
            for (int32_t v = 0; v < seen->columns; v++) {
                const pm_real *from = gradient + h * seen->down + v * seen->across;
                const int8_t *weight = w + h * seen->w_down + v * seen->w_across;
                for (int32_t k = first; k < end; k++) {
                    sum += from[k] * scale[k] * (pm_real)weight[k * filter];
                }
            }
        }
    }
    return sum;
}

void pm_q8_conv2d_dx(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale, const int32_t *shape,
                     int32_t batch, int32_t channels, int32_t results, int32_t out_step, int32_t gradient_step,
                     int32_t adds)
{
    static const pm_real zeros[4] = {0};
    const int32_t groups = shape[PM_GROUPS], tap = shape[PM_IN] / groups;
    const int32_t filter = shape[PM_WINDOW_H] * shape[PM_WINDOW_W] * tap;
    const int32_t of_rows = pm_q8_between(shape[PM_STRIDE_H], shape[PM_DILATION_H]);
    const int32_t of_columns = pm_q8_between(shape[PM_STRIDE_W], shape[PM_DILATION_W]);
    channels /= groups, results /= groups;
    for (int32_t row = 0; row < batch * shape[PM_IN_H]; row++) {
        const pm_real *image = gradient + row / shape[PM_IN_H] * shape[PM_OUT_H] * shape[PM_OUT_W] * gradient_step;
        const pm_q8_reach down = pm_q8_rows_reached(shape, row % shape[PM_IN_H], of_rows);
        for (int32_t j = 0; j < shape[PM_IN_W]; j++, out += out_step) {
            const pm_q8_reach across = pm_q8_columns_reached(shape, j, of_columns);
            const pm_q8_seen seen = pm_q8_seen_by(shape, &down, &across, gradient_step, tap);
            for (int32_t g = 0; g < groups; g++) {
                const pm_real *from = image + seen.first + g * results, *by = scale + g * results;
                const int8_t *weight = w + g * results * filter + seen.w_first;
                pm_real *to = out + g * channels;
                int32_t c = 0;
                for (; c + 4 <= channels; c += 4) {
                    pm_q8_dx_of_pixel(to + c, adds ? to + c : zeros, from, weight + c, by, &seen, results, filter);
                }
                for (; c < channels; c++) {
                    to[c] = pm_q8_dx_of_one(adds ? to[c] : 0, from, weight + c, by, &seen, results, filter);
                }
            }
        }
    }
}
