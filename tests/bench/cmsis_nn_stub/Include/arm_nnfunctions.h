/* Stands for CMSIS-NN in tests: its functions, under the names that the program calls, with what they take. It is no
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
typedef struct {
    int32_t *multiplier, *shift, is_per_channel;
} cmsis_nn_quant_params;
typedef struct {
    int32_t input_offset, filter_offset, output_offset;
    cmsis_nn_activation activation;
} cmsis_nn_fc_params;
typedef struct {
    cmsis_nn_tile stride, padding;
    cmsis_nn_activation activation;
} cmsis_nn_pool_params;

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
int32_t arm_fully_connected_s8_get_buffer_size(const cmsis_nn_dims *filter);
arm_cmsis_nn_status arm_fully_connected_wrapper_s8(const cmsis_nn_context *context, const cmsis_nn_fc_params *p,
                                                   const cmsis_nn_quant_params *scales, const cmsis_nn_dims *in,
                                                   const int8_t *x, const cmsis_nn_dims *filter, const int8_t *w,
                                                   const cmsis_nn_dims *biases, const int32_t *bias,
                                                   const cmsis_nn_dims *out, int8_t *y);
arm_cmsis_nn_status arm_elementwise_add_s8(const int8_t *a, const int8_t *b, const int32_t a_offset,
                                           const int32_t a_multiplier, const int32_t a_shift, const int32_t b_offset,
                                           const int32_t b_multiplier, const int32_t b_shift, const int32_t left_shift,
                                           int8_t *y, const int32_t offset, const int32_t multiplier,
                                           const int32_t shift, const int32_t low, const int32_t high, const int32_t n);
arm_cmsis_nn_status arm_max_pool_s8(const cmsis_nn_context *context, const cmsis_nn_pool_params *p,
                                    const cmsis_nn_dims *in, const int8_t *x, const cmsis_nn_dims *filter,
                                    const cmsis_nn_dims *out, int8_t *y);
int32_t arm_avgpool_s8_get_buffer_size(const int out_width, const int channels);
arm_cmsis_nn_status arm_avgpool_s8(const cmsis_nn_context *context, const cmsis_nn_pool_params *p,
                                   const cmsis_nn_dims *in, const int8_t *x, const cmsis_nn_dims *filter,
                                   const cmsis_nn_dims *out, int8_t *y);
