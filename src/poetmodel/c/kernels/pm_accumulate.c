/* total += gradient */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_accumulate(pm_real *total, const pm_real *gradient, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        total[i] += gradient[i];
    }
}
