/* Stands for AIfES in tests: dense layers alone, under the names that the training loop calls. It is no part of
   AIfES, and has nothing of its source. */
#ifndef AIFES_STUB_H
#define AIFES_STUB_H

#include <stdint.h>

#define TRUE 1
#define AILAYER_SETTINGS_NO_INPUT_GRADIENT 3
#define AILAYER_SETTINGS_SET(settings, mask, bit, value) ((settings) |= (uint32_t)(value) << (bit))
#define AILAYER_INPUT_F32_A(dimensions, sizes) {.shape = (sizes)}
#define AILAYER_DENSE_F32_A(width) {.columns = (width)}
#define AIOPTI_SGD_F32(rate) {.learning_rate = (rate)}
#define aif32 0

typedef struct {
    const void *dtype;
    uint8_t dim;
    uint16_t *shape;
    void *data;
} aitensor_t;

typedef struct ailayer {
    struct ailayer *input_layer, *output_layer;
    uint16_t *shape;
    uint32_t settings, columns, trainable_params_count;
    aitensor_t parameters[2], *trainable_params[2];
    float *result, *deltas;
} ailayer_t;

typedef ailayer_t ailayer_input_f32_t, ailayer_dense_f32_t;

typedef struct {
    ailayer_t base;
    void (*softmax)(const aitensor_t *x, aitensor_t *result);
} ailayer_softmax_f32_t;

typedef struct ailoss {
    ailayer_softmax_f32_t *layer;
    void (*calc_loss)(struct ailoss *self, const aitensor_t *y, void *result);
} ailoss_t, ailoss_crossentropy_f32_t;

typedef struct {
    float learning_rate;
} aiopti_t, aiopti_sgd_f32_t;

typedef struct {
    ailayer_t *input_layer, *output_layer;
    uint16_t layer_count;
    ailoss_t *loss;
} aimodel_t;

ailayer_t *ailayer_input_f32_default(ailayer_t *layer);
ailayer_t *ailayer_dense_f32_default(ailayer_t *layer, ailayer_t *input);
ailayer_t *ailayer_softmax_f32_default(ailayer_softmax_f32_t *layer, ailayer_t *input);
ailoss_t *ailoss_crossentropy_f32_default(ailoss_t *loss, ailayer_t *layer);
aiopti_t *aiopti_sgd_f32_default(aiopti_t *optimizer);
uint32_t aimath_sizeof_tensor_data(const aitensor_t *tensor);
void aialgo_compile_model(aimodel_t *model);
uint32_t aialgo_sizeof_parameter_memory(aimodel_t *model);
uint32_t aialgo_sizeof_training_memory(aimodel_t *model, aiopti_t *optimizer);
void aialgo_distribute_parameter_memory(aimodel_t *model, void *memory, uint32_t bytes);
void aialgo_schedule_training_memory(aimodel_t *model, aiopti_t *optimizer, void *memory, uint32_t bytes);
void aialgo_init_model_for_training(aimodel_t *model, aiopti_t *optimizer);
void aialgo_set_training_mode_model(aimodel_t *model, uint8_t value);
void aialgo_set_batch_mode_model(aimodel_t *model, uint8_t value);
void aialgo_zero_gradients_model(aimodel_t *model, aiopti_t *optimizer);
aitensor_t *aialgo_forward_model(aimodel_t *model, aitensor_t *x);
void aialgo_backward_model(aimodel_t *model, aitensor_t *y);
void aialgo_update_params_model(aimodel_t *model, aiopti_t *optimizer);

#endif
