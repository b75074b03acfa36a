/* out = 1 if the upper 24 bits of a random number are at least threshold, otherwise 0. See pm_random.h */
#include "pm_random.h"
#include "pm_kernels.h"

void pm_bernoulli(pm_real *out, int32_t n, int32_t site, int32_t threshold)
{
    pm_random_block block = {{0}};
    for (int32_t i = 0; i < n; i++) {
        if (i % 4 == 0) {
            block = pm_random((uint32_t)i / 4, (uint32_t)site);
        }
        out[i] = (int32_t)(block.word[i % 4] >> 8) >= threshold ? PM_C(1.0) : PM_C(0.0);
    }
}
