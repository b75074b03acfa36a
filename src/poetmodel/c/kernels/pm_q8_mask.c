/* The gradient of the limits of a layer: that of result y if y is between the limits, 0 at the limits. */
#define PM_EACH_UNROLL PM_UNROLL(4)
#include "pm_each.h"
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_mask(pm_real *out, const pm_real *gradient, const int8_t *y, const int32_t *shape, pm_real low, pm_real high)
{
    const int32_t least = (int32_t)low, most = (int32_t)high;
    PM_EACH_3(shape, i, j, k)
    {
        out[i] = least < y[k] && y[k] < most ? gradient[j] : PM_C(0.0);
    }
}
