/* pm_run STEPS LR INPUTS STATE: trains a network of AIfES on a board, on the batches of an exported step. It says
   what pm_run says, and how much memory AIfES asks for; STATE is not written. aifes_network.h is made for a network. */
#include <math.h>
#include <string.h>

#include "aifes.h"
#include "aifes_network.h"
#include "pm_platform.h"
#include "pm_text.h"

static _Alignas(16) unsigned char parameter_memory[PARAMETER_BYTES];
static _Alignas(16) unsigned char training_memory[TRAINING_BYTES];
static float samples[SAMPLE_ELEMENTS];
static int32_t labels[BATCH];
static float targets[BATCH * CLASSES];

static aimodel_t model;
static ailayer_softmax_f32_t softmax_layer;
static ailoss_crossentropy_f32_t entropy;
static aiopti_sgd_f32_t sgd = AIOPTI_SGD_F32(0.0f);

/* AIfES's own takes an approximation of the exponential, with which losses would differ. */
static void exact_softmax(const aitensor_t *x, aitensor_t *result)
{
    for (uint32_t row = 0; row < BATCH; row++) {
        const float *from = (const float *)x->data + row * CLASSES;
        float *to = (float *)result->data + row * CLASSES;
        float largest = from[0], sum = 0.0f;
        for (uint32_t k = 1; k < CLASSES; k++) largest = from[k] > largest ? from[k] : largest;
        for (uint32_t k = 0; k < CLASSES; k++) sum += to[k] = expf(from[k] - largest);
        for (uint32_t k = 0; k < CLASSES; k++) to[k] /= sum;
    }
}

static int fail(const char *what)
{
    pm_complain("AIfES: ");
    pm_complain(what);
    pm_complain("\n");
    return 2;
}

static void say_number(const char *name, uint64_t value)
{
    char text[PM_TEXT_BYTES];
    pm_complain(name);
    pm_complain(pm_text_of_integer(value, text));
    pm_complain("\n");
}

/* Copies the weights to where AIfES has put the parameters; 0 where there are not as many of both. */
static int set_weights(void)
{
    const unsigned char *next = (const unsigned char *)first_weights;
    ailayer_t *layer = model.input_layer;
    for (uint32_t k = 0; k < model.layer_count; k++, layer = layer->output_layer) {
        for (uint32_t p = 0; p < layer->trainable_params_count; p++) {
            const uint32_t bytes = aimath_sizeof_tensor_data(layer->trainable_params[p]);
            if (bytes > (uint32_t)((const unsigned char *)first_weights + sizeof first_weights - next)) return 0;
            memcpy(layer->trainable_params[p]->data, next, bytes);
            next += bytes;
        }
    }
    return next == (const unsigned char *)first_weights + sizeof first_weights;
}

/* Builds the network; returns the status for the program. */
static int set_up(aiopti_t *optimizer)
{
    ailayer_t *const last = connected_layers(&model);
    model.output_layer = ailayer_softmax_f32_default(&softmax_layer, last);
    softmax_layer.softmax = exact_softmax;
    model.loss = ailoss_crossentropy_f32_default(&entropy, model.output_layer);
    aialgo_compile_model(&model);
    /* No one needs the gradient of the network's input. */
    AILAYER_SETTINGS_SET(model.input_layer->output_layer->settings, 1, AILAYER_SETTINGS_NO_INPUT_GRADIENT, TRUE);
    const uint32_t parameter_bytes = aialgo_sizeof_parameter_memory(&model);
    const uint32_t training_bytes = aialgo_sizeof_training_memory(&model, optimizer);
    say_number("parameter_bytes ", parameter_bytes);
    say_number("training_bytes ", training_bytes);
    if (parameter_bytes > sizeof parameter_memory || training_bytes > sizeof training_memory) {
        return fail("wants more memory than it was given");
    }
    aialgo_distribute_parameter_memory(&model, parameter_memory, parameter_bytes);
    if (!set_weights()) return fail("has other parameters than the network");
    aialgo_schedule_training_memory(&model, optimizer, training_memory, training_bytes);
    aialgo_init_model_for_training(&model, optimizer);
    return 0;
}

/* What aialgo_train_model does with one batch, and the loss of its forward pass. */
static float train(aiopti_t *optimizer, aitensor_t *x, aitensor_t *y)
{
    float loss = 0.0f;
    aialgo_set_training_mode_model(&model, TRUE);
    aialgo_set_batch_mode_model(&model, TRUE);
    aialgo_zero_gradients_model(&model, optimizer);
    aialgo_forward_model(&model, x);
    model.loss->calc_loss(model.loss, y, &loss);
    aialgo_backward_model(&model, y);
    aialgo_update_params_model(&model, optimizer);
    return loss;
}

int main(int argc, char **argv)
{
    uint32_t steps, spent = 0;
    char text[PM_TEXT_BYTES];
    uint16_t target_shape[] = {BATCH, CLASSES};
    if (argc < 5 || !pm_integer_of_text(argv[1], &steps) || !pm_real_of_text(argv[2], &sgd.learning_rate)) {
        return fail("usage: pm_run STEPS LR INPUTS STATE");
    }
    const int file = pm_file_open(argv[3], PM_FILE_READ);
    if (file < 0) return fail("INPUTS cannot be read");
    aiopti_t *const optimizer = aiopti_sgd_f32_default(&sgd);
    const int status = set_up(optimizer);
    if (status) return status;
    aitensor_t x = {.dtype = aif32, .dim = DIMENSIONS, .shape = sample_shape, .data = samples};
    aitensor_t y = {.dtype = aif32, .dim = 2, .shape = target_shape, .data = targets};
    for (uint32_t step = 1; step <= steps; step++) {
        if (pm_file_read(file, samples, sizeof samples) != sizeof samples) return fail("INPUTS has no whole batch");
        if (pm_file_read(file, labels, sizeof labels) != sizeof labels) return fail("INPUTS has no whole batch");
        memset(targets, 0, sizeof targets);
        for (uint32_t k = 0; k < BATCH; k++) targets[k * CLASSES + (uint32_t)labels[k]] = 1.0f;
        pm_start_clock();
        const uint32_t start = pm_ticks();
        const float loss = train(optimizer, &x, &y);
        spent = pm_ticks() - start;
        pm_say("loss ");
        pm_say(pm_text_of_integer(step, text));
        pm_say(" ");
        pm_say(pm_text_of_real(loss, text));
        pm_say("\n");
    }
    say_number("step_instructions ", (uint64_t)spent * PM_TICK);
    pm_print_figures();
    return 0;
}
