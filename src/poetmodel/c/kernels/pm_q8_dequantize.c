/* The real numbers of a quantized tensor: (float)(x - zero) * scale (see pm_q8.h). x has its channels last, and its
   pixels are x_step elements apart; out has the layout of images: batch, channels, elements of a plane. */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_dequantize(pm_real *out, const int8_t *x, int32_t batch, int32_t channels, int32_t plane, int32_t x_step,
                      pm_real scale, int32_t zero)
{
    const float factor = (float)scale;
    for (; batch > 0; batch--) {
        for (int32_t c = 0; c < channels; c++) {
            const int8_t *from = x + c;
            for (int32_t p = plane; p > 0; p--) {
                *out++ = (pm_real)((float)(*from - zero) * factor);
                from += x_step;
            }
        }
        x += x_step * plane;
    }
}
