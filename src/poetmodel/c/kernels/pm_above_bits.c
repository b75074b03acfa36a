/* bits = whether x is above a number; `unordered` is the bit for NaN. See pm_bits.h */
#include "pm_bits.h"
#include "pm_kernels.h"

#define PM_ABOVE(k) byte |= x[k] > number ? 1u << (k) : 0u;
#define PM_NOT_BELOW(k) byte |= !(x[k] <= number) ? 1u << (k) : 0u;

void pm_above_bits(uint8_t *bits, const pm_real *x, const int32_t *shape, pm_real number, int32_t unordered)
{
    const int32_t in_line = shape[0] == 1 && shape[2] == 1;
    int32_t left = in_line ? shape[1] : 0;
    for (; left >= 8; left -= 8, x += 8) {
        uint32_t byte = 0;
        if (unordered) {
            PM_EIGHT(PM_NOT_BELOW)
        } else {
            PM_EIGHT(PM_ABOVE)
        }
        *bits++ = (uint8_t)byte;
    }
    const int32_t rest[] = {1, left, 1};
    const int32_t *others = in_line ? rest : shape;
    pm_bit_writer to = {bits, 0, 1};
    PM_EACH_1(others, i) {
        const pm_real v = x[i];
        pm_write_bit(&to, unordered ? !(v <= number) : v > number);
    }
    pm_end_bits(&to);
}
