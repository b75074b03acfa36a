/* steps += 1; n is 1, because update kernels have a number of elements */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_add_one(pm_real *steps, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        steps[i] += PM_C(1.0);
    }
}
