/* out = largest of elements of x, smallest with sign -1; NaN if one is NaN; outer and inner: see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_amax(pm_real *out, const pm_real *x, const int32_t *outer, const int32_t *inner, pm_real sign)
{
    PM_EACH_2(outer, i, j) {
        pm_real most = -PM_INFINITY;
        PM_EACH_1(inner, k) {
            const pm_real v = sign * x[j + k];
            most = v > most || v != v ? v : most;
        }
        out[i] = sign * most;
    }
}
