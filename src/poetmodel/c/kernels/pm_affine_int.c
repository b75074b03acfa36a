/* out = x * factor + shift */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_affine_int(int32_t *out, const int32_t *x, const int32_t *shape, int32_t factor, int32_t shift)
{
    PM_EACH_2(shape, i, j) {
        out[i] = x[j] * factor + shift;
    }
}
