/* pm_run: computes the layers of cmsis_nn_layers.h by kernels of CMSIS-NN and by those of exported steps, on the same
   numbers. It says `node 2k N` and `node 2k+1 N`, the instructions of both for layer k, then how many elements there are,
   how many of them differ, by how much at most, and how much memory CMSIS-NN asks for. */
#include <string.h>

#include "arm_nnfunctions.h"
#include "pm_kernels.h"
#include "pm_platform.h"
#include "pm_text.h"

enum { CONVOLUTION, DEPTHWISE, POINTWISE, LINEAR, ADD, MAXIMUM, AVERAGE };

typedef struct {
    int32_t kind, zero_x, zero_w, zero; /* the second is that of the other addend */
    float inverse;
    const int32_t *shape; /* see pm_conv.h */
    const int8_t *x, *w;  /* w is the other addend of a sum */
    const int32_t *rows, *columns; /* of pools */
    const int32_t *start;
    const float *scale, *bias;
    int32_t *multiplier, *shift; /* scale and inverse in 31 bits, and the bias in steps of the scale */
    const int32_t *rounded_bias;
} layer_t;

#include "cmsis_nn_layers.h"

#define ASIDE __attribute__((section(".measure"), aligned(16)))
static ASIDE int8_t theirs[MOST_ELEMENTS];
static ASIDE int8_t ours[MOST_ELEMENTS];
static ASIDE int8_t scratch[SCRATCH_BYTES];

#define LAYERS (sizeof layers / sizeof layers[0])
static uint32_t ticks[2 * LAYERS];

static void say(const char *name, uint32_t value)
{
    char text[PM_TEXT_BYTES];
    pm_complain(name);
    pm_complain(pm_text_of_integer(value, text));
    pm_complain("\n");
}

static void say_node(uint32_t node, uint32_t ticks)
{
    char text[PM_TEXT_BYTES];
    pm_complain("node ");
    pm_complain(pm_text_of_integer(node, text));
    say(" ", ticks * PM_TICK);
}

/* Computes a layer by CMSIS-NN, and returns how much memory it asks for; 0xFFFFFFFF where it refuses. */
static uint32_t compute_theirs(const layer_t *layer)
{
    const int32_t *s = layer->shape;
    const cmsis_nn_dims in = {1, s[1], s[2], s[0]}, out = {1, s[4], s[5], s[3]}, biases = {1, 1, 1, s[3]};
    const cmsis_nn_dims filter = {layer->kind == CONVOLUTION || layer->kind == POINTWISE ? s[3] : 1, s[6], s[7], s[0]};
    const cmsis_nn_tile stride = {s[9], s[8]}, padding = {s[11], s[10]}, dilation = {s[13], s[12]};
    const cmsis_nn_activation limits = {-128, 127};
    const cmsis_nn_per_channel_quant_params scales = {layer->multiplier, layer->shift};
    const cmsis_nn_pool_params pool = {stride, padding, limits};
    cmsis_nn_context context = {scratch, 0};
    arm_cmsis_nn_status status;
    if (layer->kind == DEPTHWISE) {
        const cmsis_nn_dw_conv_params p = {-layer->zero_x, layer->zero, 1, stride, padding, dilation, limits};
        context.size = arm_depthwise_conv_wrapper_s8_get_buffer_size(&p, &in, &filter, &out);
        if (context.size > SCRATCH_BYTES) return 0xFFFFFFFFu;
        status = arm_depthwise_conv_wrapper_s8(&context, &p, &scales, &in, layer->x, &filter, layer->w, &biases,
                                               layer->rounded_bias, &out, theirs);
    } else if (layer->kind == LINEAR) {
        const cmsis_nn_dims weights = {s[0], 1, 1, s[3]};
        const cmsis_nn_fc_params p = {-layer->zero_x, 0, layer->zero, limits};
        const cmsis_nn_quant_params by_result = {layer->multiplier, layer->shift, 1};
        context.size = arm_fully_connected_s8_get_buffer_size(&weights);
        if (context.size > SCRATCH_BYTES) return 0xFFFFFFFFu;
        status = arm_fully_connected_wrapper_s8(&context, &p, &by_result, &in, layer->x, &weights, layer->w, &biases,
                                                layer->rounded_bias, &out, theirs);
    } else if (layer->kind == ADD) {
        status = arm_elementwise_add_s8(layer->x, layer->w, -layer->zero_x, layer->multiplier[0], layer->shift[0],
                                        -layer->zero_w, layer->multiplier[1], layer->shift[1], ADD_SHIFT, theirs,
                                        layer->zero, layer->multiplier[2], layer->shift[2], -128, 127,
                                        s[3] * s[4] * s[5]);
    } else if (layer->kind == MAXIMUM) {
        status = arm_max_pool_s8(&context, &pool, &in, layer->x, &filter, &out, theirs);
    } else if (layer->kind == AVERAGE) {
        context.size = arm_avgpool_s8_get_buffer_size(out.w, in.c);
        if (context.size > SCRATCH_BYTES) return 0xFFFFFFFFu;
        status = arm_avgpool_s8(&context, &pool, &in, layer->x, &filter, &out, theirs);
    } else {
        const cmsis_nn_conv_params p = {-layer->zero_x, layer->zero, stride, padding, dilation, limits};
        context.size = arm_convolve_wrapper_s8_get_buffer_size(&p, &in, &filter, &out);
        if (context.size > SCRATCH_BYTES) return 0xFFFFFFFFu;
        status = arm_convolve_wrapper_s8(&context, &p, &scales, &in, layer->x, &filter, layer->w, &biases,
                                         layer->rounded_bias, &out, theirs);
    }
    return status == ARM_CMSIS_NN_SUCCESS ? (uint32_t)context.size : 0xFFFFFFFFu;
}

static void compute_ours(const layer_t *l)
{
    const int32_t *s = l->shape;
    if (l->kind == DEPTHWISE) {
        pm_q8_depthwise(ours, l->x, l->w, l->start, l->scale, l->bias, s, 1, s[3], l->zero_x, l->inverse, l->zero, -128,
                        127);
    } else if (l->kind == POINTWISE || l->kind == LINEAR) {
        pm_q8_pointwise(ours, l->x, l->w, l->start, l->scale, l->bias, s[1] * s[2], s[0], s[3], s[3], l->inverse,
                        l->zero, -128, 127);
    } else if (l->kind == ADD) {
        pm_q8_add(ours, l->x, l->w, s[3] * s[4] * s[5], l->scale[0], l->zero_x, l->scale[1], l->zero_w, l->inverse,
                  l->zero, -128, 127);
    } else if (l->kind == MAXIMUM) {
        pm_q8_maximum(ours, l->x, l->rows, l->columns, 1, s[0], s[4], s[5], s[1], s[2], s[0], s[0], 1, 1);
    } else if (l->kind == AVERAGE) {
        pm_q8_average(ours, l->x, l->rows, l->columns, 1, s[0], s[4], s[5], s[1], s[2], s[0], s[0], l->zero_x,
                      l->scale[0], l->inverse, l->zero, -128, 127);
    } else {
        pm_q8_conv2d(ours, l->x, l->w, l->start, l->scale, l->bias, s, 1, s[3], l->zero_x, l->inverse, l->zero, -128,
                     127);
    }
}

int main(int argc, char **argv)
{
    uint32_t elements = 0, apart = 0, most = 0, most_scratch = 0;
    (void)argc;
    (void)argv;
    pm_start_clock();
    for (uint32_t k = 0; k < LAYERS; k++) {
        const uint32_t count = (uint32_t)(layers[k].shape[3] * layers[k].shape[4] * layers[k].shape[5]);
        const uint32_t begun = pm_ticks();
        const uint32_t asked = compute_theirs(&layers[k]);
        const uint32_t between = pm_ticks();
        compute_ours(&layers[k]);
        ticks[2u * k] = between - begun;
        ticks[2u * k + 1u] = pm_ticks() - between;
        if (asked == 0xFFFFFFFFu) {
            say("CMSIS-NN refuses layer ", k);
            return 2;
        }
        most_scratch = asked > most_scratch ? asked : most_scratch;
        for (uint32_t e = 0; e < count; e++) {
            const int32_t difference = theirs[e] - ours[e];
            const uint32_t size = (uint32_t)(difference < 0 ? -difference : difference);
            apart += size > 0;
            most = size > most ? size : most;
        }
        elements += count;
    }
    for (uint32_t k = 0; k < 2u * LAYERS; k++) say_node(k, ticks[k]);
    say("elements ", elements);
    say("apart ", apart);
    say("most ", most);
    say("scratch_bytes ", most_scratch);
    pm_print_figures();
    return 0;
}
