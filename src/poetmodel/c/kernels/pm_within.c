/* Returns whether all indices are `ignored`, or from low to below high; shape loops over them */
#include "pm_each.h"
#include "pm_kernels.h"

int pm_within(const int32_t *index, const int32_t *shape, int32_t low, int32_t high, int32_t ignored)
{
    PM_EACH_1(shape, i) {
        if ((index[i] < low || index[i] >= high) && index[i] != ignored) {
            return 0;
        }
    }
    return 1;
}
