/* A plain loop in place of CMSIS-NN's sum. */
#include <math.h>

#include "arm_nnfunctions.h"

arm_cmsis_nn_status arm_elementwise_add_s8(const int8_t *a, const int8_t *b, const int32_t a_offset,
                                           const int32_t a_multiplier, const int32_t a_shift, const int32_t b_offset,
                                           const int32_t b_multiplier, const int32_t b_shift, const int32_t left_shift,
                                           int8_t *y, const int32_t offset, const int32_t multiplier,
                                           const int32_t shift, const int32_t low, const int32_t high, const int32_t n)
{
    for (int32_t k = 0; k < n; k++) {
        const double first = ldexp((double)(a[k] + a_offset) * a_multiplier, a_shift + left_shift - 31);
        const double second = ldexp((double)(b[k] + b_offset) * b_multiplier, b_shift + left_shift - 31);
        const double result = rint(ldexp((first + second) * multiplier, shift - 31)) + offset;
        y[k] = (int8_t)fmin(fmax(result, low), high);
    }
    return ARM_CMSIS_NN_SUCCESS;
}
