/* Common code of kernels on quantized tensors.

   An element q of an int8 tensor represents (q - zero) * scale, with zero and scale of the tensor; weights have a
   scale for each result, and zero = 0. Tensors have their channels last: batch, rows, columns, channels. Sums of
   products are integers, so that their order is irrelevant; they have at most 65,535 terms. Real numbers are
   computed in single precision, also if pm_real is double, and each operation is rounded separately. A result is

       clamp(rint(y) + zero, low, high)

   where rint rounds to the nearest integer, ties to even, for all y, and NaN to 0; -128 <= low <= high <= 127. For a
   sum of products, y = ((float)sum * scale + bias) * inverse: scale is that of the input times that of the weights,
   inverse is 1 over that of the result. These bytes are the same on all cores. */
#ifndef PM_Q8_H
#define PM_Q8_H

#include <string.h>

#include "pm_real.h"

/* Prevents fusion of a product and a sum on Arm; elsewhere -ffp-contract=off does. */
#if defined(__GNUC__) && defined(__arm__) && defined(__ARM_FP) && (__ARM_FP & 4)
#define PM_Q8_TERM(product) __asm__("" : "+t"(product))
#else
#define PM_Q8_TERM(product) ((void)0)
#endif

/* Cores with instructions for two halves of a word and for floats, and compilers with intrinsics for them. */
#if defined(__ARM_FEATURE_SIMD32) && defined(__ARM_FP) && (__ARM_FP & 4) && \
    (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 10))
#include <arm_acle.h>
#define PM_Q8_SIMD 1
#else
#define PM_Q8_SIMD 0
#endif

#if PM_Q8_SIMD
/* Returns the integer nearest to y, saturated to 32 bits. */
static inline int32_t pm_q8_rint(float y)
{
    int32_t found;
    __asm__("vcvtr.s32.f32 %0, %0" : "+t"(y));
    memcpy(&found, &y, sizeof found);
    return found;
}

/* Returns q + zero, saturated to int8. */
static inline int8_t pm_q8_moved(int32_t q, int32_t zero)
{
    return (int8_t)__builtin_arm_ssat(__qadd(q, zero), 8); /* __ssat of GCC converts the sign without a cast */
}

/* Returns four elements at any address as a word. pm_q8_even returns the first and third element of a word as halves,
   pm_q8_odd the second and fourth. */
static inline uint32_t pm_q8_word(const int8_t *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Prevents compilers from replacing a pointer, and from moving code before a value is computed. */
#define PM_Q8_HELD(pointer) __asm__("" : "+r"(pointer))
#define PM_Q8_AFTER(pointer, a, b) __asm__("" : "+r"(pointer) : "r"(a), "r"(b))

static inline int16x2_t pm_q8_even(uint32_t word)
{
    return __sxtb16((int8x4_t)word);
}

static inline int16x2_t pm_q8_odd(uint32_t word)
{
    int16x2_t halves;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(halves) : "r"(word));
    return halves;
}

/* Returns the larger of each pair of bytes. */
static inline uint32_t pm_q8_larger(uint32_t a, uint32_t b)
{
    (void)__ssub8((int8x4_t)a, (int8x4_t)b); /* sets the flags that __sel reads */
    return __sel((uint8x4_t)a, (uint8x4_t)b);
}

/* Returns a word with a number in both halves. */
static inline int16x2_t pm_q8_halves(int32_t number)
{
    return (int16x2_t)((uint32_t)(uint16_t)number * 0x10001u);
}
#else
/* Returns the integer nearest to y: for |y| of 1024 or more, one beyond all limits; for NaN, 0. */
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

static inline int8_t pm_q8_moved(int32_t q, int32_t zero)
{
    return (int8_t)PM_MAX(-128, PM_MIN(q + zero, 127));
}
#endif

/* Returns y as an element, without the limits of an activation: see pm_q8_limit. */
static inline int8_t pm_q8_element(float y, int32_t zero)
{
    return pm_q8_moved(pm_q8_rint(y), zero);
}

/* Returns a sum of products as an element, without the limits of an activation. */
static inline int8_t pm_q8_result(int32_t sum, float scale, float bias, float inverse, int32_t zero)
{
    float product = (float)sum * scale;
    PM_Q8_TERM(product);
    return pm_q8_element((product + bias) * inverse, zero);
}

/* Limits n elements to [low, high]. */
static inline void pm_q8_limit_line(int8_t *out, int32_t n, int32_t low, int32_t high)
{
#if PM_Q8_SIMD
    const int8x4_t lows = (int8x4_t)((uint32_t)(uint8_t)low * 0x1010101u);
    const int8x4_t highs = (int8x4_t)((uint32_t)(uint8_t)high * 0x1010101u);
    for (; n >= 4; n -= 4, out += 4) {
        int8x4_t q = (int8x4_t)pm_q8_word(out);
        (void)__ssub8(q, lows); /* sets the flags of the elements that are at least as large, for __sel */
        q = (int8x4_t)__sel((uint8x4_t)q, (uint8x4_t)lows);
        (void)__ssub8(highs, q);
        q = (int8x4_t)__sel((uint8x4_t)q, (uint8x4_t)highs);
        memcpy(out, &q, sizeof q);
    }
#endif
    for (; n > 0; n--, out++) {
        *out = (int8_t)PM_MAX(low, PM_MIN(*out, high));
    }
}

/* Limits n channels of a number of pixels, `step` elements apart; nothing to do for the limits of int8. */
static inline void pm_q8_limit(int8_t *out, int32_t pixels, int32_t n, int32_t step, int32_t low, int32_t high)
{
    if (low <= -128 && high >= 127) {
        return;
    }
    if (n == step) {
        n *= pixels, pixels = 1;
    }
    for (; pixels > 0; pixels--, out += step) {
        pm_q8_limit_line(out, n, low, high);
    }
}

/* Sums of products of two rows of x with two of w: (first, first), (second of x, first), (first, second), (second,
   second); in depthwise convolutions, sums of four channels. */
typedef struct {
    int32_t a, b, c, d;
} pm_q8_sums;

/* Adds n products to each sum; the second row of x is x_step elements after the first, that of w w_step. */
static inline void pm_q8_dots(pm_q8_sums *sums, const int8_t *x, const int8_t *w, int32_t n, int32_t x_step,
                              int32_t w_step)
{
    pm_q8_sums s = *sums;
#if PM_Q8_SIMD
    for (int32_t words = n >> 2; words > 0; words--) {
        /* The registers of the core are just sufficient, with two pointers and in this order. */
        const uint32_t second = pm_q8_word(x + x_step), first = pm_q8_word(x);
        const int16x2_t x_even = pm_q8_even(first), x_odd = pm_q8_odd(first);
        const int16x2_t y_even = pm_q8_even(second), y_odd = pm_q8_odd(second);
        uint32_t word = pm_q8_word(w + w_step);
        int16x2_t even = pm_q8_even(word), odd = pm_q8_odd(word);
        s.c = __smlad(x_even, even, s.c);
        s.c = __smlad(x_odd, odd, s.c);
        s.d = __smlad(y_even, even, s.d);
        s.d = __smlad(y_odd, odd, s.d);
        PM_Q8_AFTER(w, s.c, s.d);
        word = pm_q8_word(w);
        even = pm_q8_even(word), odd = pm_q8_odd(word);
        s.a = __smlad(x_even, even, s.a);
        s.a = __smlad(x_odd, odd, s.a);
        s.b = __smlad(y_even, even, s.b);
        s.b = __smlad(y_odd, odd, s.b);
        x += 4, w += 4;
        PM_Q8_HELD(x);
    }
    n &= 3;
#endif
    for (; n > 0; n--) {
        const int32_t first = x[0], second = x[x_step], v = w[0], u = w[w_step];
        s.a += first * v;
        s.b += second * v;
        s.c += first * u;
        s.d += second * u;
        x++, w++;
    }
    *sums = s;
}

/* Adds n products of the row x0 with w0 to a, and with w1 to c; with `moved`, those of x0 minus `zero`. */
static inline void pm_q8_dots_of_one(pm_q8_sums *sums, const int8_t *x0, const int8_t *w0, const int8_t *w1, int32_t n,
                                     int32_t zero, const int moved)
{
    int32_t a = sums->a, c = sums->c;
#if PM_Q8_SIMD
    const int16x2_t zeros = pm_q8_halves(zero);
    for (; n >= 4; n -= 4) {
        const uint32_t x = pm_q8_word(x0), v = pm_q8_word(w0), w = pm_q8_word(w1);
        int16x2_t even = pm_q8_even(x), odd = pm_q8_odd(x);
        if (moved) {
            even = __ssub16(even, zeros), odd = __ssub16(odd, zeros);
        }
        a = __smlad(even, pm_q8_even(v), a);
        a = __smlad(odd, pm_q8_odd(v), a);
        c = __smlad(even, pm_q8_even(w), c);
        c = __smlad(odd, pm_q8_odd(w), c);
        x0 += 4, w0 += 4, w1 += 4;
    }
#endif
    for (; n > 0; n--) {
        const int32_t x = *x0++ - (moved ? zero : 0);
        a += x * *w0++;
        c += x * *w1++;
    }
    sums->a = a, sums->c = c;
}

#endif
