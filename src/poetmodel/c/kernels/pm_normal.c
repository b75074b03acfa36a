/* out = mean + deviation z, with z of the standard normal distribution. See pm_random.h */
#include "pm_random.h"
#include "pm_kernels.h"

void pm_normal(pm_real *out, int32_t n, int32_t site, pm_real mean, pm_real deviation)
{
    pm_random_block block = {{0}};
    for (int32_t i = 0; i < n; i += 2) {
        if (i % 4 == 0) {
            block = pm_random((uint32_t)i / 4, (uint32_t)site);
        }
        const pm_real far = pm_random_unit(block.word[i % 4]) + PM_C(0x1p-24);
        const pm_real angle = PM_C(6.283185307179586) * pm_random_unit(block.word[i % 4 + 1]);
        const pm_real radius = deviation * PM_SQRT(PM_C(-2.0) * PM_LOG(far));
        out[i] = mean + radius * PM_COS(angle);
        if (i + 1 < n) {
            out[i + 1] = mean + radius * PM_SIN(angle);
        }
    }
}
