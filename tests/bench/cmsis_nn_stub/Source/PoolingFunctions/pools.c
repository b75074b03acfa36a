/* Plain loops in place of CMSIS-NN's pools. */
#include <math.h>

#include "arm_nnfunctions.h"

static void pool(const cmsis_nn_pool_params *p, const cmsis_nn_dims *in, const int8_t *x, const cmsis_nn_dims *filter,
                 const cmsis_nn_dims *out, int8_t *y, int mean)
{
    for (int32_t i = 0; i < out->h * out->w; i++) {
        for (int32_t c = 0; c < in->c; c++) {
            int32_t sum = 0, count = 0, largest = -128;
            for (int32_t tap = 0; tap < filter->h * filter->w; tap++) {
                const int32_t r = i / out->w * p->stride.h - p->padding.h + tap / filter->w;
                const int32_t s = i % out->w * p->stride.w - p->padding.w + tap % filter->w;
                if (r < 0 || s < 0 || r >= in->h || s >= in->w) continue;
                const int8_t q = x[(r * in->w + s) * in->c + c];
                sum += q, count++;
                largest = q > largest ? q : largest;
            }
            *y++ = (int8_t)(mean ? round((double)sum / count) : largest);
        }
    }
}

arm_cmsis_nn_status arm_max_pool_s8(const cmsis_nn_context *context, const cmsis_nn_pool_params *p,
                                    const cmsis_nn_dims *in, const int8_t *x, const cmsis_nn_dims *filter,
                                    const cmsis_nn_dims *out, int8_t *y)
{
    pool(p, in, x, filter, out, y, 0);
    return ARM_CMSIS_NN_SUCCESS;
}

int32_t arm_avgpool_s8_get_buffer_size(const int out_width, const int channels)
{
    return 4 * channels;
}

arm_cmsis_nn_status arm_avgpool_s8(const cmsis_nn_context *context, const cmsis_nn_pool_params *p,
                                   const cmsis_nn_dims *in, const int8_t *x, const cmsis_nn_dims *filter,
                                   const cmsis_nn_dims *out, int8_t *y)
{
    for (int32_t k = 0; k < context->size; k++) ((int8_t *)context->buf)[k] = 1;
    pool(p, in, x, filter, out, y, 1);
    return ARM_CMSIS_NN_SUCCESS;
}
