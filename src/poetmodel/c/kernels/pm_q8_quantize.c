/* Real numbers as int8: y = (float)x * inverse (see pm_q8.h). x has the layout of images: batch, channels, elements
   of a plane; out has its channels last. */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_quantize(int8_t *out, const pm_real *x, int32_t batch, int32_t channels, int32_t plane, pm_real inverse,
                    int32_t zero)
{
    const float factor = (float)inverse;
    for (; batch > 0; batch--) {
        for (int32_t c = 0; c < channels; c++) {
            int8_t *to = out + c;
            for (int32_t p = plane; p > 0; p--) {
                *to = pm_q8_element((float)*x++ * factor, zero);
                to += channels;
            }
        }
        out += channels * plane;
    }
}
