/* A plain loop in place of CMSIS-NN's fully connected layer. */
#include <math.h>

#include "arm_nnfunctions.h"

int32_t arm_fully_connected_s8_get_buffer_size(const cmsis_nn_dims *filter)
{
    return 0;
}

arm_cmsis_nn_status arm_fully_connected_wrapper_s8(const cmsis_nn_context *context, const cmsis_nn_fc_params *p,
                                                   const cmsis_nn_quant_params *scales, const cmsis_nn_dims *in,
                                                   const int8_t *x, const cmsis_nn_dims *filter, const int8_t *w,
                                                   const cmsis_nn_dims *biases, const int32_t *bias,
                                                   const cmsis_nn_dims *out, int8_t *y)
{
    if (!scales->is_per_channel || p->filter_offset) return ARM_CMSIS_NN_ARG_ERROR;
    for (int32_t o = 0; o < filter->c; o++) {
        int64_t sum = bias[o];
        for (int32_t i = 0; i < filter->n; i++) sum += (x[i] + p->input_offset) * *w++;
        const double result = rint(ldexp((double)sum * scales->multiplier[o], scales->shift[o] - 31)) + p->output_offset;
        y[o] = (int8_t)fmin(fmax(result, p->activation.min), p->activation.max);
    }
    return ARM_CMSIS_NN_SUCCESS;
}
