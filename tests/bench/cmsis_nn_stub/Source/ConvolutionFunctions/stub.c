/* Plain loops in place of CMSIS-NN's layers; scratch memory is asked for and written. */
#include <math.h>

#include "arm_nnfunctions.h"

enum { ASKED = 64 };

static int8_t element(int64_t sum, int32_t multiplier, int32_t shift, int32_t zero)
{
    const double y = rint(ldexp((double)sum * multiplier, shift - 31)) + zero;
    return (int8_t)(y < -128 ? -128 : y > 127 ? 127 : y);
}

static void compute(const cmsis_nn_context *context, const cmsis_nn_conv_params *p,
                    const cmsis_nn_per_channel_quant_params *scales, const cmsis_nn_dims *in, const int8_t *x,
                    const cmsis_nn_dims *filter, const int8_t *w, const int32_t *bias, const cmsis_nn_dims *out,
                    int8_t *y, int depthwise)
{
    for (int32_t k = 0; k < context->size; k++) ((int8_t *)context->buf)[k] = 1;
    for (int32_t i = 0; i < out->h; i++) {
        for (int32_t j = 0; j < out->w; j++) {
            for (int32_t o = 0; o < out->c; o++) {
                int64_t sum = bias[o];
                for (int32_t tap = 0; tap < filter->h * filter->w; tap++) {
                    const int32_t r = i * p->stride.h - p->padding.h + tap / filter->w * p->dilation.h;
                    const int32_t s = j * p->stride.w - p->padding.w + tap % filter->w * p->dilation.w;
                    if (r < 0 || s < 0 || r >= in->h || s >= in->w) continue;
                    const int8_t *from = x + (r * in->w + s) * in->c;
                    const int32_t taps = filter->h * filter->w;
                    for (int32_t c = depthwise ? o : 0; c < (depthwise ? o + 1 : in->c); c++) {
                        const int8_t *weight = depthwise ? w + tap * in->c + c : w + (o * taps + tap) * in->c + c;
                        sum += (from[c] + p->input_offset) * *weight;
                    }
                }
                *y++ = element(sum, scales->multiplier[o], scales->shift[o], p->output_offset);
            }
        }
    }
}

int32_t arm_convolve_wrapper_s8_get_buffer_size(const cmsis_nn_conv_params *p, const cmsis_nn_dims *in,
                                                const cmsis_nn_dims *filter, const cmsis_nn_dims *out)
{
    return ASKED;
}

int32_t arm_depthwise_conv_wrapper_s8_get_buffer_size(const cmsis_nn_dw_conv_params *p, const cmsis_nn_dims *in,
                                                      const cmsis_nn_dims *filter, const cmsis_nn_dims *out)
{
    return ASKED / 2;
}

arm_cmsis_nn_status arm_convolve_wrapper_s8(const cmsis_nn_context *context, const cmsis_nn_conv_params *p,
                                            const cmsis_nn_per_channel_quant_params *scales, const cmsis_nn_dims *in,
                                            const int8_t *x, const cmsis_nn_dims *filter, const int8_t *w,
                                            const cmsis_nn_dims *biases, const int32_t *bias, const cmsis_nn_dims *out,
                                            int8_t *y)
{
    if (in->c == 1) return ARM_CMSIS_NN_ARG_ERROR;
    compute(context, p, scales, in, x, filter, w, bias, out, y, 0);
    return ARM_CMSIS_NN_SUCCESS;
}

arm_cmsis_nn_status arm_depthwise_conv_wrapper_s8(const cmsis_nn_context *context, const cmsis_nn_dw_conv_params *p,
                                                  const cmsis_nn_per_channel_quant_params *scales,
                                                  const cmsis_nn_dims *in, const int8_t *x, const cmsis_nn_dims *filter,
                                                  const int8_t *w, const cmsis_nn_dims *biases, const int32_t *bias,
                                                  const cmsis_nn_dims *out, int8_t *y)
{
    const cmsis_nn_conv_params same = {p->input_offset, p->output_offset, p->stride,
                                       p->padding,      p->dilation,      p->activation};
    compute(context, &same, scales, in, x, filter, w, bias, out, y, 1);
    return ARM_CMSIS_NN_SUCCESS;
}
