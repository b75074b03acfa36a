/* A batch of one row goes through dense layers; the backward pass updates each of them after it has read it. */
#include "aifes.h"

#include <math.h>

#define MOST_LAYERS 4
#define MOST_COLUMNS 16

static const float *classes; /* of the last backward pass */

static ailayer_t *follow(ailayer_t *layer, ailayer_t *input)
{
    layer->input_layer = input;
    input->output_layer = layer;
    return layer;
}

ailayer_t *ailayer_input_f32_default(ailayer_t *layer)
{
    layer->columns = layer->shape[1];
    return layer;
}

ailayer_t *ailayer_dense_f32_default(ailayer_t *layer, ailayer_t *input)
{
    layer->trainable_params_count = 2;
    return follow(layer, input);
}

ailayer_t *ailayer_softmax_f32_default(ailayer_softmax_f32_t *layer, ailayer_t *input)
{
    layer->base.columns = input->columns;
    return follow(&layer->base, input);
}

static void calc_loss(ailoss_t *self, const aitensor_t *y, void *result)
{
    float loss = 0.0f;
    for (uint32_t k = 0; k < self->layer->base.columns; k++) {
        if (((const float *)y->data)[k] > 0.0f) loss -= logf(self->layer->base.result[k]);
    }
    *(float *)result = loss;
}

ailoss_t *ailoss_crossentropy_f32_default(ailoss_t *loss, ailayer_t *layer)
{
    loss->layer = (ailayer_softmax_f32_t *)layer;
    loss->calc_loss = calc_loss;
    return loss;
}

aiopti_t *aiopti_sgd_f32_default(aiopti_t *optimizer)
{
    return optimizer;
}

uint32_t aimath_sizeof_tensor_data(const aitensor_t *tensor)
{
    return (uint32_t)sizeof(float) * tensor->shape[0] * (tensor->dim > 1 ? tensor->shape[1] : 1u);
}

void aialgo_compile_model(aimodel_t *model)
{
    static uint16_t shapes[MOST_LAYERS][3];
    for (ailayer_t *layer = model->input_layer; layer; layer = layer->output_layer) {
        uint16_t *const shape = shapes[model->layer_count++];
        if (!layer->trainable_params_count) continue;
        shape[0] = (uint16_t)layer->input_layer->columns;
        shape[1] = shape[2] = (uint16_t)layer->columns;
        layer->parameters[0] = (aitensor_t){.dim = 2, .shape = shape};
        layer->parameters[1] = (aitensor_t){.dim = 1, .shape = shape + 2};
        for (int p = 0; p < 2; p++) layer->trainable_params[p] = &layer->parameters[p];
    }
}

static uint32_t give(aimodel_t *model, float *memory)
{
    uint32_t bytes = 0;
    for (ailayer_t *layer = model->input_layer; layer; layer = layer->output_layer) {
        for (uint32_t p = 0; p < layer->trainable_params_count; p++) {
            if (memory) layer->parameters[p].data = memory + bytes / sizeof(float);
            bytes += aimath_sizeof_tensor_data(&layer->parameters[p]);
        }
    }
    return bytes;
}

uint32_t aialgo_sizeof_parameter_memory(aimodel_t *model)
{
    return give(model, 0);
}

void aialgo_distribute_parameter_memory(aimodel_t *model, void *memory, uint32_t bytes)
{
    (void)bytes;
    give(model, memory);
}

uint32_t aialgo_sizeof_training_memory(aimodel_t *model, aiopti_t *optimizer)
{
    (void)optimizer;
    return (uint32_t)sizeof(float) * 2u * MOST_COLUMNS * model->layer_count;
}

void aialgo_schedule_training_memory(aimodel_t *model, aiopti_t *optimizer, void *memory, uint32_t bytes)
{
    float *next = memory;
    (void)optimizer, (void)bytes;
    for (ailayer_t *layer = model->input_layer; layer; layer = layer->output_layer) {
        layer->result = next;
        layer->deltas = next + MOST_COLUMNS;
        next += 2 * MOST_COLUMNS;
    }
}

void aialgo_init_model_for_training(aimodel_t *model, aiopti_t *optimizer) { (void)model, (void)optimizer; }
void aialgo_set_training_mode_model(aimodel_t *model, uint8_t value) { (void)model, (void)value; }
void aialgo_set_batch_mode_model(aimodel_t *model, uint8_t value) { (void)model, (void)value; }
void aialgo_zero_gradients_model(aimodel_t *model, aiopti_t *optimizer) { (void)model, (void)optimizer; }

aitensor_t *aialgo_forward_model(aimodel_t *model, aitensor_t *x)
{
    ailayer_t *layer = model->input_layer;
    layer->result = x->data;
    for (layer = layer->output_layer; layer->output_layer; layer = layer->output_layer) {
        const float *weight = layer->parameters[0].data, *bias = layer->parameters[1].data;
        for (uint32_t j = 0; j < layer->columns; j++) {
            float sum = bias[j];
            for (uint32_t i = 0; i < layer->input_layer->columns; i++) {
                sum += layer->input_layer->result[i] * weight[i * layer->columns + j];
            }
            layer->result[j] = sum;
        }
    }
    const aitensor_t last = {.data = layer->input_layer->result};
    aitensor_t result = {.data = layer->result};
    model->loss->layer->softmax(&last, &result);
    return 0;
}

void aialgo_backward_model(aimodel_t *model, aitensor_t *y)
{
    (void)model;
    classes = y->data;
}

void aialgo_update_params_model(aimodel_t *model, aiopti_t *optimizer)
{
    ailayer_t *layer = model->output_layer->input_layer;
    for (uint32_t j = 0; j < layer->columns; j++) layer->deltas[j] = model->output_layer->result[j] - classes[j];
    for (; layer->input_layer; layer = layer->input_layer) {
        ailayer_t *const input = layer->input_layer;
        float *weight = layer->parameters[0].data, *bias = layer->parameters[1].data;
        for (uint32_t i = 0; i < input->columns; i++) {
            float sum = 0.0f;
            for (uint32_t j = 0; j < layer->columns; j++) {
                sum += weight[i * layer->columns + j] * layer->deltas[j];
                weight[i * layer->columns + j] -= optimizer->learning_rate * input->result[i] * layer->deltas[j];
            }
            input->deltas[i] = sum;
        }
        for (uint32_t j = 0; j < layer->columns; j++) bias[j] -= optimizer->learning_rate * layer->deltas[j];
    }
}
