/* The gradient of `channels` channels of the input of a quantized layer of pixels (see pm_q8_gradients.h): sums over
   `results` channels of its result in their order. w has `in` weights for each result. Pointers are to the first
   channel and the first result; pixels are `out_step` and `gradient_step` elements apart. With `adds`, sums start
   with out, otherwise with 0. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

/* Channels of pixels: start values and addresses of the sums of 4 pixels. */
typedef struct {
    const pm_real *begin;
    int32_t begin_step, out_step, gradient_step;
} pm_q8_sums_of;

/* Computes 4 channels of 4 pixels. */
static PM_OUT_OF_LINE void pm_q8_dx_4x4(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale,
                                        int32_t in, int32_t results, const pm_q8_sums_of *sums)
{
    const pm_real *begin = sums->begin;
    pm_real a0 = begin[0], a1 = begin[1], a2 = begin[2], a3 = begin[3];
    begin += sums->begin_step;
    pm_real b0 = begin[0], b1 = begin[1], b2 = begin[2], b3 = begin[3];
    begin += sums->begin_step;
    pm_real c0 = begin[0], c1 = begin[1], c2 = begin[2], c3 = begin[3];
    begin += sums->begin_step;
    pm_real d0 = begin[0], d1 = begin[1], d2 = begin[2], d3 = begin[3];
    const pm_real *second = gradient + sums->gradient_step, *third = second + sums->gradient_step;
    const pm_real *fourth = third + sums->gradient_step;
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
    out += sums->out_step;
    out[0] = b0, out[1] = b1, out[2] = b2, out[3] = b3;
    out += sums->out_step;
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
    out += sums->out_step;
    out[0] = d0, out[1] = d1, out[2] = d2, out[3] = d3;
}

/* Computes 4 channels of a pixel. */
static PM_OUT_OF_LINE void pm_q8_dx_1x4(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale,
                                        int32_t in, int32_t results, const pm_real *begin)
{
    pm_real a = begin[0], b = begin[1], c = begin[2], d = begin[3];
    for (int32_t n = results; n > 0; n--) {
        const pm_real g = *gradient++ * *scale++;
        a += g * (pm_real)w[0], b += g * (pm_real)w[1], c += g * (pm_real)w[2], d += g * (pm_real)w[3];
        w += in;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

void pm_q8_pointwise_dx(pm_real *out, const pm_real *gradient, const int8_t *w, const pm_real *scale, int32_t pixels,
                        int32_t in, int32_t channels, int32_t results, int32_t out_step, int32_t gradient_step,
                        int32_t adds)
{
    static const pm_real zeros[4] = {0};
    const int32_t fours = channels & ~3;
    for (int32_t left = pixels; left > 0;) {
        const int32_t several = left >= 4 ? 4 : 1;
        for (int32_t c = 0; c < fours; c += 4) {
            const pm_q8_sums_of sums = {adds ? out + c : zeros, adds ? out_step : 0, out_step, gradient_step};
            if (several == 4) {
                pm_q8_dx_4x4(out + c, gradient, w + c, scale, in, results, &sums);
            } else {
                pm_q8_dx_1x4(out + c, gradient, w + c, scale, in, results, sums.begin);
            }
        }
        for (int32_t p = 0; p < several; p++) {
            for (int32_t c = fours; c < channels; c++) {
                pm_real sum = adds ? out[c] : 0;
                for (int32_t k = 0; k < results; k++) {
                    sum += gradient[k] * scale[k] * (pm_real)w[k * in + c];
                }
                out[c] = sum;
            }
            out += out_step;
            gradient += gradient_step;
        }
        left -= several;
    }
}
