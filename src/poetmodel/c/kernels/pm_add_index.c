/* out += index * step; an index below 0 counts from size. Combines several indices into one */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_add_index(int32_t *out, const int32_t *index, const int32_t *shape, int32_t step, int32_t size)
{
    PM_EACH_2(shape, i, j) {
        out[i] += (index[j] < 0 ? index[j] + size : index[j]) * step;
    }
}
