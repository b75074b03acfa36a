/* out = factor x for kept elements, otherwise 0; mask = whether kept. See pm_random.h

   An element is kept if the upper 24 bits of its random number are at least threshold. */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_random.h"

void pm_dropout(pm_real *out, uint8_t *mask, const pm_real *x, const int32_t *shape, int32_t site, int32_t threshold,
                pm_real factor)
{
    uint32_t element = 0;
    pm_random_block block = {{0}};
    PM_EACH_3(shape, i, j, k) {
        if (element % 4 == 0) {
            block = pm_random(element / 4, (uint32_t)site);
        }
        const uint8_t kept = (int32_t)(block.word[element % 4] >> 8) >= threshold;
        out[i] = kept ? x[k] * factor : PM_C(0.0);
        mask[j] = kept;
        element++;
    }
}
