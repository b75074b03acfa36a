/* The mean of each window of a quantized tensor: y = ((float)sum * scale) * inverse, where sum is that of x minus
   zero_x, scale is that of x over the number of elements of a window, and inverse is 1 over the scale of the result
   (see pm_q8.h). `rows` and `columns` have begin and end of the window of each row and column of out (`height` x
   `width`). Windows of one element convert a tensor to another scale, zero or limits. */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_average(int8_t *out, const int8_t *x, const int32_t *rows, const int32_t *columns, int32_t batch,
                   int32_t channels, int32_t height, int32_t width, int32_t x_height, int32_t x_width, int32_t out_step,
                   int32_t x_step, int32_t zero_x, pm_real scale, pm_real inverse, int32_t zero, int32_t low,
                   int32_t high)
{
    const float own = (float)scale, factor = (float)inverse;
    const int32_t line = x_width * x_step;
    int8_t *to = out;
    for (int32_t i = 0; i < batch * height; i++) {
        const int32_t *restrict const row = rows + 2 * (i % height);
        const int32_t image = i / height * x_height * line;
        for (int32_t j = 0; j < width; j++) {
            const int32_t *restrict const column = columns + 2 * j;
            const int32_t seen = column[1] - column[0], tall = row[1] - row[0];
            const int8_t *first = x + image + row[0] * line + column[0] * x_step;
            const int32_t start = -zero_x * seen * tall;
            int32_t c = 0;
#if PM_Q8_SIMD
            /* Sums of at most 256 bytes fit halves of words. */
            for (; c + 3 < channels && seen * tall <= 256; c += 4) {
                int16x2_t even = 0, odd = 0;
                for (int32_t r = 0; r < tall; r++) {
                    const int8_t *from = first + c + r * line;
                    for (int32_t k = seen; k > 0; k--) {
                        const uint32_t word = pm_q8_word(from);
                        even = __sadd16(even, pm_q8_even(word));
                        odd = __sadd16(odd, pm_q8_odd(word));
                        from += x_step;
                    }
                }
                to[c] = pm_q8_element((float)(start + (int16_t)even) * own * factor, zero);
                to[c + 1] = pm_q8_element((float)(start + (int16_t)odd) * own * factor, zero);
                to[c + 2] = pm_q8_element((float)(start + (even >> 16)) * own * factor, zero);
                to[c + 3] = pm_q8_element((float)(start + (odd >> 16)) * own * factor, zero);
            }
#endif
            for (; c < channels; c++) {
                int32_t sum = start;
                for (int32_t r = 0; r < tall; r++) {
                    const int8_t *from = first + c + r * line;
                    for (int32_t k = seen; k > 0; k--) {
                        sum += *from;
                        from += x_step;
                    }
                }
                to[c] = pm_q8_element((float)sum * own * factor, zero);
            }
            to += out_step;
        }
    }
    pm_q8_limit(out, batch * height * width, channels, out_step, low, high);
}
