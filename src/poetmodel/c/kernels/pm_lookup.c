/* out = table[x]: bytes as real numbers, by a table of 256 entries, or one table per channel; an int8_t is
   reinterpreted as uint8_t */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"

void pm_lookup(pm_real *out, const uint8_t *x, const pm_real *table, const int32_t *shape)
{
    PM_EACH_3(shape, i, j, k) {
        out[i] = table[k + x[j]];
    }
}
