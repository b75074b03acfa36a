/* out = index of the first largest element of x, smallest with sign -1; the first NaN if there is one; outer and inner:
   see pm_each.h */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_argmax(int32_t *out, const pm_real *x, const int32_t *outer, const int32_t *inner, pm_real sign)
{
    PM_EACH_2(outer, i, j) {
        pm_real most = -PM_INFINITY;
        int32_t position = 0;
        int32_t found = 0;
        PM_EACH_1(inner, k) {
            const pm_real v = sign * x[j + k];
            if (v > most || (v != v && most == most)) {
                most = v;
                found = position;
            }
            position++;
        }
        out[i] = found;
    }
}
