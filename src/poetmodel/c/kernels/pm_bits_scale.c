/* out = factor x if the bit is 1, otherwise 0. See pm_bits.h */
#include "pm_bits.h"
#include "pm_kernels.h"

#define PM_SCALED(k) out[k] = byte & 1u << (k) ? x[k] * factor : PM_C(0.0);

void pm_bits_scale(pm_real *out, const pm_real *x, const uint8_t *bits, const int32_t *shape, pm_real factor)
{
    const int32_t in_line = shape[0] == 1 && shape[2] == 1 && shape[3] == 1;
    int32_t left = in_line ? shape[1] : 0;
    for (; left >= 8; left -= 8, x += 8, out += 8) {
        const uint32_t byte = *bits++;
        PM_EIGHT(PM_SCALED)
    }
    const int32_t rest[] = {1, left, 1, 1};
    const int32_t *others = in_line ? rest : shape;
    pm_bit_reader from = {bits, 1};
    PM_EACH_2(others, i, j) {
        out[i] = pm_read_bit(&from) ? x[j] * factor : PM_C(0.0);
    }
}
