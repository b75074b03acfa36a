/* The sum of two quantized tensors of n elements: y = ((float)(a - a_zero) * a_scale + (float)(b - b_zero) * b_scale) *
   inverse (see pm_q8.h). */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_add(int8_t *out, const int8_t *a, const int8_t *b, int32_t n, pm_real a_scale, int32_t a_zero,
               pm_real b_scale, int32_t b_zero, pm_real inverse, int32_t zero, int32_t low, int32_t high)
{
    const float of_a = (float)a_scale, of_b = (float)b_scale, factor = (float)inverse;
    int8_t *to = out;
    for (int32_t k = n; k > 0; k--) {
        float first = (float)(*a++ - a_zero) * of_a, second = (float)(*b++ - b_zero) * of_b;
        PM_Q8_TERM(first);
        PM_Q8_TERM(second);
        *to++ = pm_q8_element((first + second) * factor, zero);
    }
    pm_q8_limit(out, 1, n, n, low, high);
}
