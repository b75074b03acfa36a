/* out = table[x]: bytes as int8, by a table of 256 entries, or one table per channel: the result of pm_lookup and
   pm_q8_quantize for each byte. x has strides of images, channels and elements; out has its channels last. */
#include "pm_kernels.h"

void pm_q8_lookup(int8_t *out, const uint8_t *x, const int8_t *table, int32_t batch, int32_t channels, int32_t plane,
                  int32_t image_step, int32_t channel_step, int32_t element_step, int32_t table_step)
{
    for (; batch > 0; batch--) {
        for (int32_t c = 0; c < channels; c++) {
            const int8_t *const codes = table + c * table_step;
            const uint8_t *from = x + c * channel_step;
            int8_t *to = out + c;
            for (int32_t p = plane; p > 0; p--) {
                *to = codes[*from];
                to += channels;
                from += element_step;
            }
        }
        out += channels * plane;
        x += image_step;
    }
}
