/* out = x min(max(x + 3, 0), 6) / 6 */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_hardswish(pm_real *out, const pm_real *x, const int32_t *shape)
{
    PM_EACH_2(shape, i, j) {
        const pm_real v = x[j];
        const pm_real part = v + PM_C(3.0);
        out[i] = v * (part < 0 ? PM_C(0.0) : part > PM_C(6.0) ? PM_C(6.0) : part) / PM_C(6.0);
    }
}
