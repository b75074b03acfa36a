/* total += the sum of the squares of x */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_square_sum(pm_real *total, const pm_real *x, const int32_t *shape)
{
    pm_total sum = {total[0], 0};
    PM_EACH_1(shape, i) {
        pm_add_to(&sum, x[i] * x[i]);
    }
    total[0] = sum.sum;
}
