/* out[index * step] += x, unless the index is `skipped`; shape as for pm_scatter */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_scatter_add(pm_real *out, const pm_real *x, const int32_t *index, const int32_t *shape, int32_t step,
                    int32_t size, int32_t skipped)
{
    PM_EACH_3(shape, i, j, k) {
        if (index[k] != skipped) {
            out[j + (index[k] < 0 ? index[k] + size : index[k]) * step] += x[i];
        }
    }
}
