/* bits = whether x is above a number; `unordered` says what NaN has. See pm_bits.h */
#include "pm_bits.h"
#include "pm_kernels.h"

void pm_above_bits(uint8_t *bits, const pm_real *x, const int32_t *shape, pm_real number, int32_t unordered)
{
    pm_bit_writer to = {bits, 0, 1};
    PM_EACH_1(shape, i) {
        const pm_real v = x[i];
        pm_write_bit(&to, unordered ? !(v <= number) : v > number);
    }
    pm_end_bits(&to);
}
