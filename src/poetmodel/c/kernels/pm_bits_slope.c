/* out = x if the bit is 1, otherwise slope x. See pm_bits.h */
#include "pm_bits.h"
#include "pm_kernels.h"

void pm_bits_slope(pm_real *out, const pm_real *x, const uint8_t *bits, const int32_t *shape, pm_real slope)
{
    pm_bit_reader from = {bits, 1};
    PM_EACH_2(shape, i, j) {
        out[i] = pm_read_bit(&from) ? x[j] : x[j] * slope;
    }
}
