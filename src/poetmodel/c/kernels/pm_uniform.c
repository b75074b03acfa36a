/* out = first + width u, with u uniformly distributed from 0 to below 1. See pm_random.h */
#include "pm_random.h"
#include "pm_kernels.h"

void pm_uniform(pm_real *out, int32_t n, int32_t site, pm_real first, pm_real width)
{
    pm_random_block block = {{0}};
    for (int32_t i = 0; i < n; i++) {
        if (i % 4 == 0) {
            block = pm_random((uint32_t)i / 4, (uint32_t)site);
        }
        out[i] = first + width * pm_random_unit(block.word[i % 4]);
    }
}
