/* out = whether the relation of x to y is one of `wanted`: 1 less, 2 equal, 4 greater, 8 unordered (NaN) */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_compare(uint8_t *out, const pm_real *x, const pm_real *y, const int32_t *shape, int32_t wanted)
{
    PM_EACH_3(shape, i, j, k) {
        const int32_t relation = x[j] < y[k] ? 1 : x[j] == y[k] ? 2 : x[j] > y[k] ? 4 : 8;
        out[i] = (relation & wanted) != 0;
    }
}
