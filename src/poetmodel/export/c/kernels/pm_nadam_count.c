/* Counts a step of NAdam, and multiplies its momentum to those before */
#include "pm_nadam.h"
#include "pm_kernels.h"

void pm_nadam_count(pm_real *steps, pm_real *product, int32_t n, pm_real beta, pm_real log_decay)
{
    for (int32_t i = 0; i < n; i++) {
        steps[i] += PM_C(1.0);
        product[i] *= pm_nadam_momentum(steps[i], beta, log_decay);
    }
}
