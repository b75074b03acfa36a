/* out = a number, for n elements */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_fill_byte(uint8_t *out, int32_t n, int32_t value)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = (uint8_t)value;
    }
}
