/* pm_run STEPS LR INPUTS STATE [resume] [state=FILE] [infer=OUTPUTS] [evaluate] [stored] [FAULT:CALL]: trains, on a
   host or on an emulated board.

   Executes STEPS steps on the batches in the file INPUTS, and starts again at the end of the file. Each batch has
   the arrays of all inputs. Prints a line "loss STEP VALUE" for each step, and writes all state to the file STATE,
   or the gradients of the last step without an optimizer. "resume" continues from the last committed state on
   storage, and prints the number of its steps. "state=FILE" starts with the state in a file with the format of
   STATE; constant state must have the values of this program. "infer=OUTPUTS" writes the result of pm_infer for the
   first batch after the steps to a file. "evaluate" prints a line "evaluation BATCH LOSS CORRECT" for each batch of
   the file after the steps. "stored" stores the first batches as samples before the steps, which then train on
   these. "stop:TIME" ends the program after a time (pm_stop_after). FAULT:CALL, with FAULTS=1, is a fault of
   pm_faults.h. Status: 0; 2 for invalid arguments or files; 9 after a stop or a power cut; 10 + the error number of
   a failed call; after a failed step, state is written too. */
#include "../src/pm_runtime.h"
#include "pm_platform.h"
#include "pm_text.h"

#ifdef PM_FAULTS
#include "pm_faults.h"
#endif

#define PART 64u /* number of elements of state per read or write */
#define WORD (4u * PM_SCALE) /* alignment of each array of a batch [bytes] */

static _Alignas(16) unsigned char pm_batch[PM_INPUT_BYTES * PM_SCALE + 1];

static int pm_fail(const char *what, const char *subject)
{
    pm_complain("pm_run: ");
    pm_complain(subject);
    pm_complain(what);
    pm_complain("\n");
    return 2;
}

static uint32_t pm_bytes_of_element(const pm_tensor_t *tensor)
{
    return tensor->integer_bytes ? tensor->integer_bytes : (uint32_t)sizeof(pm_real);
}

/* Reads the next batch to the input arrays; returns 0 at the end of the file. */
static int pm_read_batch(int file, const void **inputs)
{
    unsigned char *next = pm_batch;
    for (int32_t i = 0; i < PM_INPUTS; i++) {
        const uint32_t bytes = pm_inputs_info[i].elements * pm_bytes_of_element(&pm_inputs_info[i]);
        inputs[i] = next;
        if (pm_file_read(file, next, bytes) != bytes) return 0;
        next += (bytes + WORD - 1u) / WORD * WORD;
    }
    return 1;
}

/* Reads the file to its end, and rewinds it; returns 0 unless it has complete batches, as for a file of floats in a
   build for double. */
static int pm_has_batches(int file)
{
    uint32_t whole = 0, bytes, batches = 0;
    for (int32_t i = 0; i < PM_INPUTS; i++) {
        whole += pm_inputs_info[i].elements * pm_bytes_of_element(&pm_inputs_info[i]);
    }
    while (whole && (bytes = pm_file_read(file, pm_batch, whole)) != 0) {
        if (bytes != whole) return 0;
        batches++;
    }
    return (batches || !whole) && pm_file_seek(file, 0) == 0;
}

static int pm_next_batch(int file, const void **inputs)
{
    return pm_read_batch(file, inputs) || (pm_file_seek(file, 0) == 0 && pm_read_batch(file, inputs));
}

static void pm_print_loss(uint32_t step, pm_real loss)
{
    char text[PM_TEXT_BYTES];
    pm_say("loss ");
    pm_say(pm_text_of_integer(step, text));
    pm_say(" ");
    pm_say(pm_text_of_real(loss, text));
    pm_say("\n");
}

static void pm_print_error(const char *what, uint32_t step, int error)
{
    char text[PM_TEXT_BYTES];
    pm_complain("pm_run: ");
    pm_complain(what);
    if (step) pm_complain(pm_text_of_integer(step, text));
    pm_complain(": error ");
    pm_complain(pm_text_of_integer((uint64_t)error, text));
    pm_complain(error == PM_TORN          ? " (the state is torn)\n"
                : error == PM_ERROR_EMPTY ? " (storage has no state: train without resume first)\n"
                : error == PM_ERROR_OTHER ? " (storage has the state of another program)\n"
                                          : "\n");
}

/* Writes all state, or the gradients of a step without updates. */
#if PM_GRADIENTS > 0
#define PM_RESULTS PM_GRADIENTS
#define PM_RESULTS_NAME "reading gradients"
#define pm_results_info pm_gradients_info
#define pm_read_result_part pm_read_gradient_part
#else
#define PM_RESULTS PM_STATES
#define PM_RESULTS_NAME "reading state"
#define pm_results_info pm_states_info
#define pm_read_result_part pm_read_state_part
#endif

static int pm_write_results(const char *name)
{
    pm_real part[PART];
    const pm_tensor_t *const info = pm_results_info;
    const int file = pm_file_open(name, PM_FILE_WRITE);
    if (file < 0) return pm_fail(": cannot be written", name);
    for (int32_t k = 0; k < PM_RESULTS; k++) {
        for (uint32_t first = 0; first < info[k].elements; first += PART) {
            const uint32_t left = info[k].elements - first;
            const uint32_t now = left < PART ? left : PART;
            const int error = pm_read_result_part(k, first, now, part);
            const uint32_t bytes = now * pm_bytes_of_element(&info[k]);
            if (error) {
                pm_print_error(PM_RESULTS_NAME, 0, error);
                return 10 + error;
            }
            if (pm_file_write(file, part, bytes) != bytes) return pm_fail(": cannot be written", name);
        }
    }
    return 0;
}

#if PM_OUTPUTS
static const char *pm_outputs_name; /* output file; 0 if not requested */
static pm_real pm_outputs[PM_OUTPUTS];

static int pm_write_outputs(int file)
{
    const void *inputs[PM_INPUTS];
    if (pm_file_seek(file, 0) < 0 || !pm_read_batch(file, inputs)) return pm_fail(": has no whole batch", "INPUTS");
    const int error = pm_infer(inputs, pm_outputs);
    if (error) {
        pm_print_error("pm_infer", 0, error);
        return 10 + error;
    }
    const int made = pm_file_open(pm_outputs_name, PM_FILE_WRITE);
    if (made < 0 || pm_file_write(made, pm_outputs, sizeof pm_outputs) != sizeof pm_outputs) {
        return pm_fail(": cannot be written", pm_outputs_name);
    }
    return 0;
}
#endif

#if PM_REPLAY
static int pm_stored; /* whether steps are on stored samples */

/* Stores the first batches of the file, up to the number of samples. */
static int pm_keep_batches(int file)
{
    const void *inputs[PM_INPUTS];
    for (uint32_t batch = 1; batch <= PM_REPLAY && pm_read_batch(file, inputs); batch++) {
        const int error = pm_keep_sample(inputs, 0);
        if (error) {
            pm_print_error("pm_keep_sample ", batch, error);
            return 10 + error;
        }
    }
    return pm_file_seek(file, 0) < 0 ? pm_fail(": cannot be read", "INPUTS") : 0;
}
#endif

#if PM_EVALUATES
static int pm_evaluates; /* whether evaluation is requested */

/* Prints loss and correct samples of each batch in the file. */
static int pm_evaluate_batches(int file)
{
    const void *inputs[PM_INPUTS];
    char text[PM_TEXT_BYTES];
    if (pm_file_seek(file, 0) < 0) return pm_fail(": cannot be read", "INPUTS");
    for (uint32_t batch = 1; pm_read_batch(file, inputs); batch++) {
        pm_real loss = PM_C(0);
        uint32_t correct;
        const int error = pm_evaluate(inputs, &loss, &correct);
        if (error) {
            pm_print_error("pm_evaluate ", batch, error);
            return 10 + error;
        }
        pm_say("evaluation ");
        pm_say(pm_text_of_integer(batch, text));
        pm_say(" ");
        pm_say(pm_text_of_real(loss, text));
        pm_say(" ");
        pm_say(pm_text_of_integer(correct, text));
        pm_say("\n");
    }
    return 0;
}
#endif

static int pm_begin(int resume, uint32_t *done)
{
    *done = 0;
#if PM_COMMIT
    if (resume) {
        int error = pm_resume();
#if PM_MIGRATES
        if (error == PM_ERROR_OTHER) error = pm_migrate();
#endif
        *done = pm_steps;
        if (error == PM_RESUMED_OLDER) pm_complain("pm_run: the newest generation is damaged, and the one before was taken\n");
        return error == PM_RESUMED_OLDER ? PM_OK : error;
    }
#endif
    return resume ? PM_ERROR_EMPTY : pm_init();
}

#if PM_STATES
static const char *pm_first_name; /* the initial state file; 0 if not requested */

static int pm_is_state(int k, uint32_t first, uint32_t count, const pm_real *values)
{
    const uint32_t size = pm_bytes_of_element(&pm_states_info[k]);
    pm_real own;
    for (uint32_t j = 0; j < count; j++) {
        if (pm_read_state_part(k, first + j, 1u, &own)) return 0;
        if (memcmp(&own, (const char *)values + (size_t)j * size, size) != 0) return 0;
    }
    return 1;
}

static int pm_read_first_state(void)
{
    pm_real part[PART];
    const int file = pm_file_open(pm_first_name, PM_FILE_READ);
    if (file < 0) return pm_fail(": cannot be read", pm_first_name);
    for (int32_t k = 0; k < PM_STATES; k++) {
        for (uint32_t first = 0; first < pm_states_info[k].elements; first += PART) {
            const uint32_t left = pm_states_info[k].elements - first;
            const uint32_t now = left < PART ? left : PART;
            const uint32_t bytes = now * pm_bytes_of_element(&pm_states_info[k]);
            if (pm_file_read(file, part, bytes) != bytes) return pm_fail(": has not all state", pm_first_name);
            const int error = pm_write_state_part(k, first, now, part);
            if (error == PM_READ_ONLY && !pm_is_state(k, first, now, part)) {
                return pm_fail(": has other values of state that no step changes; export that model", pm_first_name);
            }
            if (error && error != PM_READ_ONLY) {
                pm_print_error("writing state", 0, error);
                return 10 + error;
            }
        }
    }
    return 0;
}
#endif

/* Parses the arguments after the first four; returns 0, or 2 after a message about an invalid one. */
static int pm_read_words(int count, char **words, int *resume)
{
    *resume = 0;
    for (int k = 0; k < count; k++) {
        char *const colon = strchr(words[k], ':');
        uint32_t number;
        if (strcmp(words[k], "resume") == 0) {
            *resume = 1;
            continue;
        }
#if PM_STATES
        if (strncmp(words[k], "state=", 6) == 0) {
            pm_first_name = words[k] + 6;
            continue;
        }
#endif
#if PM_OUTPUTS
        if (strncmp(words[k], "infer=", 6) == 0) {
            pm_outputs_name = words[k] + 6;
            continue;
        }
#endif
#if PM_REPLAY
        if (strcmp(words[k], "stored") == 0) {
            pm_stored = 1;
            continue;
        }
#endif
#if PM_EVALUATES
        if (strcmp(words[k], "evaluate") == 0) {
            pm_evaluates = 1;
            continue;
        }
#endif
        if (!colon || !pm_integer_of_text(colon + 1, &number)) return pm_fail(": not understood", words[k]);
        *colon = 0;
        if (strcmp(words[k], "stop") == 0) {
            pm_stop_after(number);
            continue;
        }
#ifdef PM_FAULTS
        if (pm_set_fault(words[k], number) == PM_OK) continue;
#endif
        return pm_fail(": no such fault in this build", words[k]);
    }
    return 0;
}

static int pm_train(uint32_t steps, pm_real lr, int file, uint32_t done)
{
    const void *inputs[PM_INPUTS];
    uint32_t spent = 0;
    char text[PM_TEXT_BYTES];
    for (uint32_t step = 0; step < steps + done; step++) {
        pm_real loss = PM_C(0);
        if (!pm_next_batch(file, inputs)) return pm_fail(": has no whole batch", "INPUTS");
        if (step < done) continue;
        pm_start_clock();
        uint32_t start = pm_ticks();
#ifdef PM_WEAR
        pm_storage_ticks = 0;
#endif
#ifdef PM_PROFILE
        pm_profile_start();
#endif
#if PM_REPLAY
        const int error = pm_stored ? pm_step_stored(step % pm_samples(), lr, &loss) : pm_step(inputs, lr, &loss);
#else
        const int error = pm_step(inputs, lr, &loss);
#endif
#ifdef PM_PROFILE
        pm_profile_stop();
#endif
#ifdef PM_WEAR
        start += pm_storage_ticks; /* flash has the timing of its device */
#endif
        spent = pm_ticks() - start;
        if (error) {
            pm_print_error("step ", step + 1u, error);
            return 10 + error;
        }
        pm_print_loss(step + 1u, loss);
    }
#ifdef __arm__
    if (steps) {
        pm_complain("step_instructions ");
        pm_complain(pm_text_of_integer((uint64_t)spent * PM_TICK, text));
        pm_complain("\n");
    }
#else
    (void)spent;
    (void)text;
#endif
    return 0;
}

int main(int argc, char **argv)
{
    uint32_t steps, done;
    pm_real lr;
    int resume;
    if (argc < 5 || !pm_integer_of_text(argv[1], &steps) || !pm_real_of_text(argv[2], &lr)) {
        return pm_fail("STEPS LR INPUTS STATE [resume] [state=FILE] [infer=OUTPUTS] [evaluate] [stored] [FAULT:CALL]", "usage: pm_run ");
    }
    if (pm_read_words(argc - 5, argv + 5, &resume)) return 2;
    const int file = pm_file_open(argv[3], PM_FILE_READ);
    if (file < 0) return pm_fail(": cannot be read", argv[3]);
    if (steps && !pm_has_batches(file)) {
        return pm_fail(PM_IS_DOUBLE ? ": expected whole batches, their reals in double" : ": expected whole batches",
                       argv[3]);
    }
    int status = pm_begin(resume, &done);
    if (status) {
        pm_print_error(resume ? "pm_resume" : "pm_init", 0, status);
        return 10 + status;
    }
    if (resume) {
        char text[PM_TEXT_BYTES];
        pm_complain("resumed ");
        pm_complain(pm_text_of_integer(done, text));
        pm_complain("\n");
    }
#if PM_STATES
    if (pm_first_name) status = pm_read_first_state();
#endif
#if PM_REPLAY
    if (!status && pm_stored) status = pm_keep_batches(file);
#endif
    if (!status) status = pm_train(steps, lr, file, done);
#if PM_EVALUATES
    if (!status && pm_evaluates) status = pm_evaluate_batches(file);
#endif
#if PM_OUTPUTS
    if (!status && pm_outputs_name) status = pm_write_outputs(file);
#endif
    if (status != 2) {
        const int written = pm_write_results(argv[4]);
        if (!status) status = written;
    }
#ifdef PM_PROFILE
    pm_profile_print(steps);
#endif
#ifdef PM_FAULTS
    char text[PM_TEXT_BYTES];
    pm_complain("storage_reads ");
    pm_complain(pm_text_of_integer(pm_reads, text));
    pm_complain("\nstorage_writes ");
    pm_complain(pm_text_of_integer(pm_writes, text));
    pm_complain("\n");
#endif
#ifdef PM_WEAR
    pm_print_wear();
#endif
    pm_print_figures();
    return status;
}
