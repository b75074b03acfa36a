/* Stands for CMSIS-NN in tests: two functions, under the names that the program calls, with what they take. It is no
   part of CMSIS-NN, and has nothing of its source. */
#include <stdint.h>

typedef enum { ARM_CMSIS_NN_SUCCESS = 0, ARM_CMSIS_NN_ARG_ERROR = -1 } arm_cmsis_nn_status;
typedef struct {
    void *buf;
    int32_t size;
} cmsis_nn_context;
typedef struct {
    int32_t n, h, w, c;
} cmsis_nn_dims;
typedef struct {
    int32_t w, h;
} cmsis_nn_tile;
typedef struct {
    int32_t min, max;
} cmsis_nn_activation;
typedef struct {
    int32_t *multiplier, *shift;
} cmsis_nn_per_channel_quant_params;
typedef struct {
    int32_t input_offset, output_offset;
    cmsis_nn_tile stride, padding, dilation;
    cmsis_nn_activation activation;
} cmsis_nn_conv_params;
typedef struct {
    int32_t input_offset, output_offset, ch_mult;
    cmsis_nn_tile stride, padding, dilation;
    cmsis_nn_activation activation;
} cmsis_nn_dw_conv_params;

int32_t arm_convolve_wrapper_s8_get_buffer_size(const cmsis_nn_conv_params *p, const cmsis_nn_dims *in,
                                                const cmsis_nn_dims *filter, const cmsis_nn_dims *out);
int32_t arm_depthwise_conv_wrapper_s8_get_buffer_size(const cmsis_nn_dw_conv_params *p, const cmsis_nn_dims *in,
                                                      const cmsis_nn_dims *filter, const cmsis_nn_dims *out);
arm_cmsis_nn_status arm_convolve_wrapper_s8(const cmsis_nn_context *context, const cmsis_nn_conv_params *p,
                                            const cmsis_nn_per_channel_quant_params *scales, const cmsis_nn_dims *in,
                                            const int8_t *x, const cmsis_nn_dims *filter, const int8_t *w,
                                            const cmsis_nn_dims *biases, const int32_t *bias, const cmsis_nn_dims *out,
                                            int8_t *y);
arm_cmsis_nn_status arm_depthwise_conv_wrapper_s8(const cmsis_nn_context *context, const cmsis_nn_dw_conv_params *p,
                                                  const cmsis_nn_per_channel_quant_params *scales,
                                                  const cmsis_nn_dims *in, const int8_t *x, const cmsis_nn_dims *filter,
                                                  const int8_t *w, const cmsis_nn_dims *biases, const int32_t *bias,
                                                  const cmsis_nn_dims *out, int8_t *y);
