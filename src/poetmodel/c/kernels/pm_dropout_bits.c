/* bits = whether the upper 24 bits of a random number are at least threshold. See pm_random.h and pm_bits.h */
#include "pm_bits.h"
#include "pm_kernels.h"
#include "pm_random.h"

void pm_dropout_bits(uint8_t *bits, int32_t n, int32_t site, int32_t threshold)
{
    pm_bit_writer to = {bits, 0, 1};
    pm_random_block block = {{0}};
    for (int32_t i = 0; i < n; i++) {
        if (i % 4 == 0) {
            block = pm_random((uint32_t)i / 4, (uint32_t)site);
        }
        pm_write_bit(&to, (int32_t)(block.word[i % 4] >> 8) >= threshold);
    }
    pm_end_bits(&to);
}
