/* Numbers as text, and text as numbers: see pm_text.h. */
#include "pm_text.h"

#include <stdlib.h>
#include <string.h>

/* A number in base 10^9, before and after the point, long enough for all digits of a pm_real. */
#define PM_BASE 1000000000u
#if PM_IS_DOUBLE
enum { BEFORE = 35, AFTER = 120, MANTISSA_BITS = 52, EXPONENT_BITS = 11 };
typedef uint64_t pm_bits;
#else
enum { BEFORE = 5, AFTER = 17, MANTISSA_BITS = 23, EXPONENT_BITS = 8 };
typedef uint32_t pm_bits;
#endif
enum { LIMBS = BEFORE + AFTER, DIGITS_OF_LIMB = 9, BIAS = (1 << (EXPONENT_BITS - 1)) - 1 };

static void pm_times_power_of_two(uint32_t *limb, int32_t exponent)
{
    while (exponent > 0) {
        const int32_t bits = exponent < 29 ? exponent : 29;
        uint64_t carry = 0;
        for (int32_t i = LIMBS - 1; i >= 0; i--) {
            carry += (uint64_t)limb[i] << bits;
            limb[i] = (uint32_t)(carry % PM_BASE);
            carry /= PM_BASE;
        }
        exponent -= bits;
    }
    while (exponent < 0) {
        const int32_t bits = -exponent < 9 ? -exponent : 9; /* 2^9 divides 10^9 */
        uint32_t carry = 0;
        for (int32_t i = 0; i < LIMBS; i++) {
            const uint32_t rest = limb[i] & ((1u << bits) - 1u);
            limb[i] = (limb[i] >> bits) + carry;
            carry = (PM_BASE >> bits) * rest;
        }
        exponent += bits;
    }
}

static uint32_t pm_digit(const uint32_t *limb, int32_t place)
{
    uint32_t rest = limb[place / DIGITS_OF_LIMB];
    for (int32_t i = place % DIGITS_OF_LIMB; i < DIGITS_OF_LIMB - 1; i++) rest /= 10u;
    return rest % 10u;
}

/* Returns whether the digits from `place` on round up: more than half of the digit before, or half if that is odd. */
static int pm_rounds_up(const uint32_t *limb, int32_t place)
{
    const int32_t end = LIMBS * DIGITS_OF_LIMB;
    if (place >= end || pm_digit(limb, place) < 5u) return 0;
    if (pm_digit(limb, place) > 5u) return 1;
    for (int32_t k = place + 1; k < end; k++) {
        if (pm_digit(limb, k)) return 1;
    }
    return (int)(pm_digit(limb, place - 1) & 1u);
}

static char *pm_put(char *text, const char *word)
{
    const size_t length = strlen(word);
    memcpy(text, word, length + 1u);
    return text + length;
}

static void pm_put_exponent(char *text, int32_t exponent)
{
    const uint32_t size = (uint32_t)(exponent < 0 ? -exponent : exponent);
    char digits[PM_TEXT_BYTES];
    text = pm_put(text, exponent < 0 ? "e-" : "e+");
    if (size < 10u) text = pm_put(text, "0");
    (void)pm_put(text, pm_text_of_integer(size, digits));
}

const char *pm_text_of_real(pm_real value, char *text)
{
    uint32_t limb[LIMBS] = {0};
    char digits[PM_DIGITS + 1];
    pm_bits bits;
    char *end = text;
    memcpy(&bits, &value, sizeof bits);
    const pm_bits fraction = bits & (((pm_bits)1 << MANTISSA_BITS) - 1u);
    const int32_t power = (int32_t)(bits >> MANTISSA_BITS & ((1u << EXPONENT_BITS) - 1u));
    if (bits >> (MANTISSA_BITS + EXPONENT_BITS)) end = pm_put(end, "-");
    if (power == (1 << EXPONENT_BITS) - 1) {
        (void)pm_put(end, fraction ? "nan" : "inf");
        return text;
    }
    const uint64_t mantissa = power ? (uint64_t)fraction | (uint64_t)1 << MANTISSA_BITS : fraction;
    limb[BEFORE - 1] = (uint32_t)(mantissa % PM_BASE);
    limb[BEFORE - 2] = (uint32_t)(mantissa / PM_BASE);
    pm_times_power_of_two(limb, (power ? power : 1) - BIAS - MANTISSA_BITS);

    int32_t first = mantissa ? 0 : BEFORE * DIGITS_OF_LIMB - 1;
    while (mantissa && pm_digit(limb, first) == 0) first++;
    int32_t exponent = BEFORE * DIGITS_OF_LIMB - 1 - first;
    for (int32_t k = 0; k < PM_DIGITS; k++) {
        const int32_t place = first + k;
        digits[k] = (char)('0' + (place < LIMBS * DIGITS_OF_LIMB ? pm_digit(limb, place) : 0u));
    }
    digits[PM_DIGITS] = 0;
    if (pm_rounds_up(limb, first + PM_DIGITS)) {
        int32_t k = PM_DIGITS - 1;
        while (k >= 0 && digits[k] == '9') digits[k--] = '0';
        if (k >= 0) {
            digits[k]++;
        } else {
            digits[0] = '1';
            exponent++;
        }
    }
    *end++ = digits[0];
    *end++ = '.';
    end = pm_put(end, digits + 1);
    pm_put_exponent(end, exponent);
    return text;
}

const char *pm_text_of_integer(uint64_t value, char *text)
{
    char reversed[PM_TEXT_BYTES];
    int32_t count = 0;
    do {
        reversed[count++] = (char)('0' + (char)(value % 10u));
        value /= 10u;
    } while (value);
    for (int32_t k = 0; k < count; k++) text[k] = reversed[count - 1 - k];
    text[count] = 0;
    return text;
}

int pm_integer_of_text(const char *text, uint32_t *value)
{
    uint64_t found = 0;
    if (!*text) return 0;
    for (; *text; text++) {
        if (*text < '0' || *text > '9') return 0;
        found = found * 10u + (uint64_t)(*text - '0');
        if (found > UINT32_MAX) return 0;
    }
    *value = (uint32_t)found;
    return 1;
}

#if PM_IS_DOUBLE
int pm_real_of_text(const char *text, pm_real *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == 0;
}
#else
/* Up to 15 digits and powers of ten up to 22 are exact in double, so that only one operation rounds, as in strtod. */
int pm_real_of_text(const char *text, pm_real *value)
{
    const int negative = *text == '-';
    uint64_t digits = 0;
    int32_t exponent = 0, point = 0, any = 0;
    if (*text == '-' || *text == '+') text++;
    for (; (*text >= '0' && *text <= '9') || (*text == '.' && !point); text++) {
        if (*text == '.') {
            point = 1;
            continue;
        }
        any = 1;
        if (digits < 100000000000000000u) {
            digits = digits * 10u + (uint64_t)(*text - '0');
            exponent -= point;
        } else {
            exponent += 1 - point;
        }
    }
    if (any && (*text == 'e' || *text == 'E')) {
        const int32_t sign = text[1] == '-' ? -1 : 1;
        uint32_t power;
        text += text[1] == '-' || text[1] == '+' ? 2 : 1;
        if (!pm_integer_of_text(text, &power) || power > 400u) return 0;
        exponent += sign * (int32_t)power;
        text += strlen(text);
    }
    double found = (double)digits, ten = 1.0;
    for (int32_t k = exponent < 0 ? -exponent : exponent; k > 0; k--) {
        ten *= 10.0;
        if (k > 1 && ten < 1e22) continue;
        found = exponent < 0 ? found / ten : found * ten;
        ten = 1.0;
    }
    *value = (pm_real)(negative ? -found : found);
    return any && *text == 0;
}
#endif
