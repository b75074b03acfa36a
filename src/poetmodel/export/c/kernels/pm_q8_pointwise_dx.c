/* The gradient of the input of a quantized layer of pixels (see pm_q8_gradients.h): w has `in` weights for each result. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

/* 4 channels of 4 pixels. */
static PM_OUT_OF_LINE void pm_q8_dx_4x4(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale,
                                        int32_t in, int32_t results)
{
    pm_real a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    pm_real c0 = 0, c1 = 0, c2 = 0, c3 = 0, d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    const pm_real *second = gradient + results, *third = second + results, *fourth = third + results;
    for (int32_t n = results; n > 0; n--) {
        const pm_real w0 = (pm_real)w[0], w1 = (pm_real)w[1], w2 = (pm_real)w[2], w3 = (pm_real)w[3], by = *scale++;
        pm_real g = *gradient++ * by;
        a0 += g * w0, a1 += g * w1, a2 += g * w2, a3 += g * w3;
        g = *second++ * by;
        b0 += g * w0, b1 += g * w1, b2 += g * w2, b3 += g * w3;
        g = *third++ * by;
        c0 += g * w0, c1 += g * w1, c2 += g * w2, c3 += g * w3;
        g = *fourth++ * by;
        d0 += g * w0, d1 += g * w1, d2 += g * w2, d3 += g * w3;
        w += in;
    }
    out[0] = a0, out[1] = a1, out[2] = a2, out[3] = a3;
    out += in;
    out[0] = b0, out[1] = b1, out[2] = b2, out[3] = b3;
    out += in;
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
    out += in;
    out[0] = d0, out[1] = d1, out[2] = d2, out[3] = d3;
}

/* 4 channels of a pixel. */
static PM_OUT_OF_LINE void pm_q8_dx_1x4(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale,
                                        int32_t in, int32_t results)
{
    pm_real a = 0, b = 0, c = 0, d = 0;
    for (int32_t n = results; n > 0; n--) {
        const pm_real g = *gradient++ * *scale++;
        a += g * (pm_real)w[0], b += g * (pm_real)w[1], c += g * (pm_real)w[2], d += g * (pm_real)w[3];
        w += in;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

void pm_q8_pointwise_dx(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale, int32_t pixels,
                        int32_t in, int32_t results)
{
    const int32_t fours = in & ~3;
    for (int32_t left = pixels; left > 0;) {
        const int32_t several = left >= 4 ? 4 : 1;
        for (int32_t c = 0; c < fours; c += 4) {
            if (several == 4) {
                pm_q8_dx_4x4(out + c, gradient, w + c, scale, in, results);
            } else {
                pm_q8_dx_1x4(out + c, gradient, w + c, scale, in, results);
            }
        }
        for (int32_t p = 0; p < several; p++) {
            for (int32_t c = fours; c < in; c++) {
                pm_real sum = 0;
                for (int32_t k = 0; k < results; k++) {
                    sum += gradient[k] * scale[k] * (pm_real)w[k * in + c];
                }
                out[c] = sum;
            }
            out += in;
            gradient += results;
        }
        left -= several;
    }
}
