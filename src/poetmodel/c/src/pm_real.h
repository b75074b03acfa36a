/* The number type of a step, float, or double with -DPM_REAL=double, and its functions. */
#ifndef PM_REAL_H
#define PM_REAL_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef PM_REAL
#define PM_REAL float
#endif

#define PM_IS_DOUBLE_float 0
#define PM_IS_DOUBLE_double 1
#define PM_PASTE(a, b) a##b
#define PM_PASTE_EXPANDED(a, b) PM_PASTE(a, b)
#define PM_IS_DOUBLE PM_PASTE_EXPANDED(PM_IS_DOUBLE_, PM_REAL)

typedef PM_REAL pm_real;

/* A literal with all digits, rounded to double and then to pm_real, as PyTorch does with scalars. The compiler does
   the rounding: no double arithmetic is executed. */
#define PM_C(literal) ((pm_real)(literal))
#define PM_INFINITY ((pm_real)INFINITY)

#if PM_IS_DOUBLE
#define PM_SCALE 2 /* sizeof(pm_real) / 4: offsets and sizes of reals are stated for float */
#define PM_DIGITS 17 /* significant decimal digits that identify a number */
#define PM_LARGEST DBL_MAX
#define PM_EPSILON DBL_EPSILON
#define PM_SQRT(x) sqrt(x)
#define PM_EXP(x) exp(x)
#define PM_EXPM1(x) expm1(x)
#define PM_LOG(x) log(x)
#define PM_LOG1P(x) log1p(x)
#define PM_TANH(x) tanh(x)
#define PM_ERF(x) erf(x)
#define PM_POW(x, y) pow(x, y)
#define PM_SIN(x) sin(x)
#define PM_COS(x) cos(x)
#define PM_FABS(x) fabs(x)
#define PM_FLOOR(x) floor(x)
#define PM_CEIL(x) ceil(x)
#define PM_RINT(x) rint(x)
#else
#define PM_SCALE 1
#define PM_DIGITS 9
#define PM_LARGEST FLT_MAX
#define PM_EPSILON FLT_EPSILON
#define PM_SQRT(x) sqrtf(x)
#define PM_EXP(x) expf(x)
#define PM_EXPM1(x) expm1f(x)
#define PM_LOG(x) logf(x)
#define PM_LOG1P(x) log1pf(x)
#define PM_TANH(x) tanhf(x)
#define PM_ERF(x) erff(x)
#define PM_POW(x, y) powf(x, y)
#define PM_SIN(x) sinf(x)
#define PM_COS(x) cosf(x)
#define PM_FABS(x) fabsf(x)
#define PM_FLOOR(x) floorf(x)
#define PM_CEIL(x) ceilf(x)
#define PM_RINT(x) rintf(x)
#endif

/* Returns whether a number is finite, by its bits, because compilers may assume that all numbers are finite. */
static inline int pm_is_finite(pm_real x)
{
#if PM_IS_DOUBLE
    const uint64_t exponent = 0x7FF0000000000000u;
    uint64_t bits;
#else
    const uint32_t exponent = 0x7F800000u;
    uint32_t bits;
#endif
    memcpy(&bits, &x, sizeof bits);
    return (bits & exponent) != exponent;
}

/* For functions that compute several sums at once: inlined, they would exceed the registers of the caller. */
#ifdef __GNUC__
#define PM_OUT_OF_LINE __attribute__((noinline))
#else
#define PM_OUT_OF_LINE
#endif

/* Unrolls the following loop by a factor; sums keep their order. GCC only: Clang unrolls by itself. */
#if defined(__GNUC__) && __GNUC__ >= 8 && !defined(__clang__) && !defined(__INTEL_COMPILER)
#define PM_PRAGMA(text) _Pragma(#text)
#define PM_UNROLL(times) PM_PRAGMA(GCC unroll times)
#else
#define PM_UNROLL(times)
#endif

/* Returns the second argument if either is NaN: PM_MAX(0, x) passes NaN through. May evaluate arguments twice. */
#define PM_MAX(x, y) ((x) > (y) ? (x) : (y))
#define PM_MIN(x, y) ((x) < (y) ? (x) : (y))

#endif
