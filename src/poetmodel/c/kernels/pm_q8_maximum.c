/* The largest element of each window of a quantized tensor, with unchanged scale and zero (see pm_q8.h). `rows` and
   `columns` have begin and end of the window of each row and column of out (`height` x `width`); elements of a
   window are `row_step` and `column_step` apart, pixels of out and x `out_step` and `x_step`. */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_maximum(int8_t *out, const int8_t *x, const int32_t *rows, const int32_t *columns, int32_t batch,
                   int32_t channels, int32_t height, int32_t width, int32_t x_height, int32_t x_width, int32_t out_step,
                   int32_t x_step, int32_t row_step, int32_t column_step)
{
    for (int32_t i = 0; i < batch * height; i++) {
        const int32_t *restrict const row = rows + 2 * (i % height);
        const int8_t *image = x + i / height * x_height * x_width * x_step;
        for (int32_t j = 0; j < width; j++) {
            const int32_t *restrict const column = columns + 2 * j;
            int32_t c = 0;
#if PM_Q8_SIMD
            for (; c + 3 < channels; c += 4) {
                uint32_t best = 0x80808080u;
                for (int32_t y = row[0]; y < row[1]; y += row_step) {
                    const int8_t *from = image + (y * x_width + column[0]) * x_step + c;
                    for (int32_t z = column[0]; z < column[1]; z += column_step, from += column_step * x_step) {
                        best = pm_q8_larger(best, pm_q8_word(from));
                    }
                }
                memcpy(out + c, &best, sizeof best);
            }
#endif
            for (; c < channels; c++) {
                int32_t best = -128;
                for (int32_t y = row[0]; y < row[1]; y += row_step) {
                    for (int32_t z = column[0]; z < column[1]; z += column_step) {
                        const int32_t q = image[(y * x_width + z) * x_step + c];
                        best = PM_MAX(best, q);
                    }
                }
                out[c] = (int8_t)best;
            }
            out += out_step;
        }
    }
}
