/* Quantized tensors: what their kernels share.

An element q of a tensor of int8 stands for (q - zero) * scale, where zero and scale are those of the tensor; weights
have a scale for each result, and no zero. Tensors lie with their channels last: batch, rows, columns, channels. Sums of
products are integers, which have no order; they have at most 65,535 terms. Real numbers are computed in single precision, also where pm_real is double,
and each operation is rounded by itself. A result is

    clamp(rint(y) + zero, low, high)

where rint takes the even one of two that are as near, however large y is, and NaN as 0; -128 <= low, high <= 127. Of a
sum of products y = ((float)sum * scale + bias) * inverse: scale is that of the input times that of the weights, inverse
is 1 over that of the result. Whatever ways a core has, the bytes are these. */
#ifndef PM_Q8_H
#define PM_Q8_H

#include <string.h>

#include "pm_real.h"

/* Keeps a product that is a term from being fused with the sum, where flags do not. */
#if defined(__GNUC__) && defined(__arm__) && defined(__ARM_FP)
#define PM_Q8_TERM(product) __asm__("" : "+t"(product))
#else
#define PM_Q8_TERM(product) ((void)0)
#endif

/* The integer nearest to y; of 1024 or more one that is past all limits. */
static inline int32_t pm_q8_rint(float y)
{
    uint32_t bits;
    memcpy(&bits, &y, sizeof bits);
    const int32_t exponent = (int32_t)(bits >> 23 & 255u) - 127;
    uint32_t found = 0;
    if (exponent >= 10) {
        found = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0 : 1024;
    } else if (exponent >= -1) {
        const uint32_t all = (bits & 0x7FFFFFu) | 0x800000u, shift = (uint32_t)(23 - exponent);
        found = (all + (1u << (shift - 1)) - 1 + (all >> shift & 1u)) >> shift;
    }
    return bits >> 31 ? -(int32_t)found : (int32_t)found;
}

/* y as an element, without the limits of an activation: see pm_q8_limit. */
static inline int8_t pm_q8_element(float y, int32_t zero)
{
    const int32_t q = pm_q8_rint(y) + zero;
    return (int8_t)PM_MAX(-128, PM_MIN(q, 127));
}

/* The same of a sum of products. */
static inline int8_t pm_q8_result(int32_t sum, float scale, float bias, float inverse, int32_t zero)
{
    float product = (float)sum * scale;
    PM_Q8_TERM(product);
    return pm_q8_element((product + bias) * inverse, zero);
}

/* Brings elements within limits. */
static inline void pm_q8_limit(int8_t *out, int32_t n, int32_t low, int32_t high)
{
    if (low <= -128 && high >= 127) {
        return;
    }
    for (; n > 0; n--, out++) {
        *out = (int8_t)PM_MAX(low, PM_MIN(*out, high));
    }
}

/* Sums of products of two rows of x with two rows of w: a of x0 and w0, b of x1 and w0, c of x0 and w1, d of x1 and w1. */
typedef struct {
    int32_t a, b, c, d;
} pm_q8_sums;

/* Adds to these n products each; where not `both`, only those of x0. `zero` is taken from x. */
static inline void pm_q8_dots(pm_q8_sums *sums, const int8_t *x0, const int8_t *x1, const int8_t *w0, const int8_t *w1,
                              int32_t n, int32_t zero, const int both)
{
    pm_q8_sums s = *sums;
    for (; n > 0; n--) {
        const int32_t x = *x0++ - zero, v = *w0++, w = *w1++;
        s.a += x * v;
        s.c += x * w;
        if (both) {
            const int32_t y = *x1++ - zero;
            s.b += y * v;
            s.d += y * w;
        }
    }
    *sums = s;
}

#endif
