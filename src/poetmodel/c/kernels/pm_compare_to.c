/* out = whether the relation of x to a number is one of `wanted`: 1 less, 2 equal, 4 greater, 8 unordered (NaN) */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_compare_to(uint8_t *out, const pm_real *x, const int32_t *shape, int32_t wanted, pm_real y)
{
    PM_EACH_2(shape, i, j) {
        const int32_t relation = x[j] < y ? 1 : x[j] == y ? 2 : x[j] > y ? 4 : 8;
        out[i] = (relation & wanted) != 0;
    }
}
