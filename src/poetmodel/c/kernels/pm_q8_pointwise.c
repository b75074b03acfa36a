/* A quantized layer in which each result of a pixel is a sum over its channels: a convolution of 1 x 1, or a linear
   layer with rows as pixels. Pixels are out_step elements apart in out (see pm_q8.h). w has `in` weights for each
   result; start has for each result the first value of its sum: the sum of its weights times minus the zero of x. */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_pointwise(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                     const pm_real *bias, int32_t pixels, int32_t in, int32_t results, int32_t out_step,
                     pm_real inverse, int32_t zero, int32_t low, int32_t high)
{
    /* Stored bytes may alias any object: pointers to inputs must be restrict. */
    const pm_real *restrict const scales = scale, *restrict const biases = bias;
    const int32_t *restrict const starts = start;
    const float factor = (float)inverse;
    int32_t c = 0;
    for (; c + 1 < results; c += 2, w += 2 * in) {
        const float scale_0 = (float)scales[c], scale_1 = (float)scales[c + 1];
        const float bias_0 = (float)biases[c], bias_1 = (float)biases[c + 1];
        const int32_t start_0 = starts[c], start_1 = starts[c + 1];
        const int8_t *from = x;
        int8_t *to = out + c;
        for (int32_t pairs = pixels >> 1; pairs > 0; pairs--) {
            pm_q8_sums s = {start_0, start_0, start_1, start_1};
            pm_q8_dots(&s, from, w, in, in, in);
            to[0] = pm_q8_result(s.a, scale_0, bias_0, factor, zero);
            to[1] = pm_q8_result(s.c, scale_1, bias_1, factor, zero);
            to += out_step;
            to[0] = pm_q8_result(s.b, scale_0, bias_0, factor, zero);
            to[1] = pm_q8_result(s.d, scale_1, bias_1, factor, zero);
            to += out_step;
            from += 2 * in;
        }
        if (pixels & 1) {
            pm_q8_sums s = {start_0, 0, start_1, 0};
            pm_q8_dots_of_one(&s, from, w, w + in, in, 0, 0);
            to[0] = pm_q8_result(s.a, scale_0, bias_0, factor, zero);
            to[1] = pm_q8_result(s.c, scale_1, bias_1, factor, zero);
        }
    }
    if (results & 1) {
        /* The last one of an odd number: two pixels at once; of an odd number of pixels, the last one twice. */
        for (int32_t p = 0; p < pixels; p += 2, x += 2 * in) {
            const int32_t other = p + 1 < pixels;
            int8_t *const to = out + p * out_step + c;
            pm_q8_sums s = {starts[c], 0, starts[c], 0};
            pm_q8_dots_of_one(&s, w, x, x + other * in, in, 0, 0);
            to[0] = pm_q8_result(s.a, (float)scales[c], (float)biases[c], factor, zero);
            to[other * out_step] = pm_q8_result(s.c, (float)scales[c], (float)biases[c], factor, zero);
        }
    }
    pm_q8_limit(out, pixels, results, out_step, low, high);
}
