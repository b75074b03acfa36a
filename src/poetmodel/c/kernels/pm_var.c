/* out = the variance, or standard deviation, of elements of x; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_var(pm_real *out, const pm_real *x, const int32_t *outer, const int32_t *inner, int32_t is_deviation,
            pm_real n, pm_real divisor)
{
    PM_EACH_2(outer, i, j) {
        pm_total total = {0, 0};
        PM_EACH_1(inner, l) {
            pm_add_to(&total, x[j + l]);
        }
        const pm_real mean = total.sum / n;
        total = (pm_total){0, 0};
        PM_EACH_1(inner, k) {
            const pm_real distance = x[j + k] - mean;
            pm_add_to(&total, distance * distance);
        }
        out[i] = is_deviation ? PM_SQRT(total.sum / divisor) : total.sum / divisor;
    }
}
