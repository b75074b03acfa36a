/* out = log of sums of exp(x); outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"
#include "pm_total.h"

void pm_logsumexp(pm_real *out, const pm_real *x, const int32_t *outer, const int32_t *inner)
{
    PM_EACH_2(outer, i, j) {
        pm_real most = -PM_LARGEST;
        PM_EACH_1(inner, l) {
            most = x[j + l] > most ? x[j + l] : most;
        }
        pm_total total = {0, 0};
        PM_EACH_1(inner, k) {
            pm_add_to(&total, PM_EXP(x[j + k] - most));
        }
        out[i] = PM_LOG(total.sum) + most;
    }
}
