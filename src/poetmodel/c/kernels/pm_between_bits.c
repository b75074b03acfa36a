/* bits = whether x is strictly between two numbers; `unordered` is the bit for NaN. See pm_bits.h */
#include "pm_bits.h"
#include "pm_kernels.h"

void pm_between_bits(uint8_t *bits, const pm_real *x, const int32_t *shape, pm_real low, pm_real high,
                     int32_t unordered)
{
    pm_bit_writer to = {bits, 0, 1};
    PM_EACH_1(shape, i) {
        const pm_real v = x[i];
        pm_write_bit(&to, unordered ? !(v <= low || v >= high) : v > low && v < high);
    }
    pm_end_bits(&to);
}
