/* out = whether any truth value of x differs from `unwanted`; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_any(uint8_t *out, const uint8_t *x, const int32_t *outer, const int32_t *inner, int32_t unwanted)
{
    PM_EACH_2(outer, i, j) {
        uint8_t found = 0;
        PM_EACH_1(inner, k) {
            found |= (x[j + k] != 0) != unwanted;
        }
        out[i] = found;
    }
}
