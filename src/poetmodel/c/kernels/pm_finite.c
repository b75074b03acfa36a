/* Returns whether n numbers are finite. */
#include "pm_kernels.h"

int pm_finite(const pm_real *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (!pm_is_finite(x[i])) {
            return 0;
        }
    }
    return 1;
}
