/* out[index * step] = x; negative indices count from size

   shape loops over x, out without the indexed dimension, and index. */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_scatter(pm_real *out, const pm_real *x, const int32_t *index, const int32_t *shape, int32_t step,
                int32_t size)
{
    PM_EACH_3(shape, i, j, k) {
        out[j + (index[k] < 0 ? index[k] + size : index[k]) * step] = x[i];
    }
}
