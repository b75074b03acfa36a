/* out = x[index * step] of integers, as pm_gather */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_gather_int(int32_t *out, const int32_t *x, const int32_t *index, const int32_t *shape, int32_t step,
                   int32_t size)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = x[j + (index[k] < 0 ? index[k] + size : index[k]) * step];
    }
}
