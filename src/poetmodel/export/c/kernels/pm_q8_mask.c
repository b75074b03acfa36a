/* The gradient of n elements of a layer's result y where these are between its limits, and 0 at them. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_mask(pm_real *out, const pm_real *gradient, const int8_t *y, int32_t n, int32_t low, int32_t high)
{
    for (; n > 0; n--) {
        const pm_real g = *gradient++;
        *out++ = low < *y && *y < high ? g : PM_C(0.0);
        y++;
    }
}
