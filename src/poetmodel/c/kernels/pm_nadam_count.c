/* Increments the steps of NAdam, and multiplies the product of momenta by that of the step */
#include "pm_nadam.h"
#include "pm_kernels.h"

void pm_nadam_count(pm_real *steps, pm_real *product, int32_t n, pm_real beta, pm_real log_decay)
{
    for (int32_t i = 0; i < n; i++) {
        steps[i] += PM_C(1.0);
        product[i] *= pm_nadam_momentum(steps[i], beta, log_decay);
    }
}
