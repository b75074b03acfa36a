/* A quantized layer in which each result of a pixel is a sum over its channels: a convolution of 1 x 1, or a linear
layer, whose rows are the pixels (see pm_q8.h). w has `in` weights for each result; start has for each result what a sum
begins with: the sum of its weights times minus the zero of x. */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_pointwise(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                     const pm_real *bias, int32_t pixels, int32_t in, int32_t results, pm_real inverse, int32_t zero,
                     int32_t low, int32_t high)
{
    /* Bytes that are stored may be a part of anything else: what is read must be said not to be. */
    const pm_real *restrict const scales = scale, *restrict const biases = bias;
    const int32_t *restrict const starts = start;
    const float factor = (float)inverse;
    int8_t *to = out;
    for (int32_t p = 0; p < pixels; p += 2) {
        const int both = p + 1 < pixels;
        const int8_t *v = w;
        /* The last one of an odd number of results is made twice. */
        for (int32_t c = 0; c < results; c += 2) {
            const int32_t e = c + 1 < results ? c + 1 : c;
            const int8_t *const other = e > c ? v + in : v;
            pm_q8_sums s = {starts[c], starts[c], starts[e], starts[e]};
            const float c_scale = (float)scales[c], c_bias = (float)biases[c];
            const float e_scale = (float)scales[e], e_bias = (float)biases[e];
            if (both) {
                pm_q8_dots(&s, x, x + in, v, other, in, 0, 1);
                to[results + c] = pm_q8_result(s.b, c_scale, c_bias, factor, zero);
                to[results + e] = pm_q8_result(s.d, e_scale, e_bias, factor, zero);
            } else {
                pm_q8_dots(&s, x, x, v, other, in, 0, 0);
            }
            to[c] = pm_q8_result(s.a, c_scale, c_bias, factor, zero);
            to[e] = pm_q8_result(s.c, e_scale, e_bias, factor, zero);
            v += 2 * in;
        }
        x += 2 * in;
        to += 2 * results;
    }
    pm_q8_limit(out, pixels * results, low, high);
}
