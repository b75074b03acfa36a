/* Takes over the state of another step, `old`, over NOR flash of its own whose power is cut: `migrate FIRST COUNT`. */
#define _GNU_SOURCE
#include "new.h"
#include "old.h"
#define FLASH_BYTES (NEW_STORED_BYTES > OLD_STORED_BYTES ? NEW_STORED_BYTES : OLD_STORED_BYTES)
#define FLASH_UNIT NEW_STORAGE_UNIT
#define FLASH_BLOCK NEW_STORAGE_BLOCK
#include "cut_flash.h"

enum { TENSORS = 16, STEPS = 5 };

typedef struct {
    int resumed, migrated, old, done;
    uint32_t steps, old_state;
    uint32_t sums[TENSORS]; /* of the tensors of the new step */
} shared_t;

static shared_t *shared;
static float values[ELEMENTS];

int old_storage_read(uint32_t address, void *to, uint32_t count)
{
    return read_flash(address, to, count);
}

int old_storage_write(uint32_t address, const void *from, uint32_t count)
{
    return write_flash(address, from, count, -1);
}

int new_storage_read(uint32_t address, void *to, uint32_t count)
{
    return read_flash(address, to, count);
}

int new_storage_write(uint32_t address, const void *from, uint32_t count)
{
    return write_flash(address, from, count, -1);
}

const void *old_storage_address(uint32_t address)
{
    return flash + address;
}

const void *new_storage_address(uint32_t address)
{
    return flash + address;
}

static uint32_t sum_of(const void *data, uint32_t bytes)
{
    const unsigned char *byte = data;
    uint32_t sum = 2166136261u;
    for (uint32_t k = 0; k < bytes; k++) sum = (sum ^ byte[k]) * 16777619u;
    return sum;
}

static uint32_t old_sum(int index)
{
    if (old_read_state(index, values)) abort();
    return sum_of(values, old_states_info[index].elements * 4u);
}

static uint32_t new_sum(int index)
{
    if (new_read_state(index, values)) abort();
    return sum_of(values, new_states_info[index].elements * 4u);
}

static uint32_t old_state(void)
{
    uint32_t all[OLD_STATES];
    for (int k = 0; k < OLD_STATES; k++) all[k] = old_sum(k);
    return sum_of(all, sizeof all);
}

static int train_old(uint32_t steps)
{
    static float data[OLD_INPUTS][ELEMENTS];
    const void *inputs[OLD_INPUTS];
    float loss;
    int error = old_init();
    for (uint32_t step = 0; step < steps && !error; step++) {
        for (int k = 0; k < OLD_INPUTS; k++) {
            inputs[k] = data[k];
            for (uint32_t i = 0; i < old_inputs_info[k].elements && !old_inputs_info[k].integer_bytes; i++) {
                data[k][i] = (float)((i * 7u + step * 13u) % 17u) / 8 - 1;
            }
        }
        error = old_step(inputs, 0.1f, &loss);
    }
    return error;
}

/* A firmware with the new step, from its start on: it migrates where that is needed, and trains no step. */
static void start(uint32_t unused)
{
    (void)unused;
    shared->resumed = new_resume();
    shared->migrated = -1;
    int error = shared->resumed;
    if (error == NEW_ERROR_OTHER) error = shared->migrated = new_migrate();
    if (!error && new_resume()) error = 99; /* what it has taken over is a generation like others */
    for (int k = 0; k < NEW_STATES && !error; k++) shared->sums[k] = new_sum(k);
    shared->steps = new_steps;
    shared->done = !error;
    _exit(error);
}

static void start_old(uint32_t unused)
{
    (void)unused;
    shared->old = old_resume();
    if (!shared->old) shared->old_state = old_state();
    _exit(0);
}

static int run(void (*what)(uint32_t), uint32_t cut_at, uint32_t kind)
{
    shared->done = 0;
    return run_cut(what, 0, cut_at, kind);
}

int main(int count, char **words)
{
    static uint32_t first[TENSORS], expected[TENSORS];
    static const int pairs[][2] = {PAIRS}; /* tensors of the new step and of the old one */
    static unsigned char kept[FLASH_BYTES];
    if (count != 3) return 2;
    shared = map_flash(sizeof *shared);
    if (new_migrate() != NEW_ERROR_EMPTY || new_init()) return 3;
    for (int k = 0; k < NEW_STATES; k++) first[k] = new_sum(k);
    const uint32_t begin = (uint32_t)atoi(words[1]), trials = (uint32_t)atoi(words[2]);
    for (uint32_t trial = begin; trial < begin + trials; trial++) {
        const uint32_t steps = trial % STEPS;
        const char *what = 0;
        power->random = trial * 2654435761u, power->bad = 0, power->cut_at = 0;
        memset(flash, 0xFF, FLASH_BYTES);
        if (train_old(steps)) return 4;
        memcpy(expected, first, sizeof first);
        for (unsigned k = 0; k < sizeof pairs / sizeof *pairs; k++) expected[pairs[k][0]] = old_sum(pairs[k][1]);
        const uint32_t state = old_state();
        memcpy(kept, flash, FLASH_BYTES);
        if (run(start, 0, 0) || shared->steps != steps) what = "no migration";
        const uint32_t operations = power->operations;
        memcpy(flash, kept, FLASH_BYTES);
        for (uint32_t more = 1u + trial % 3u; more && !what; more--) {
            const int status = run(start, 1u + number() % operations, number() % 4u);
            if (status == 0) continue;
            if (status != CUT) what = "an error beside the cut";
        }
        /* Now either the new state is whole, or the old one. */
        if (!what && run(start, 0, 0)) what = "no end";
        for (int k = 0; k < NEW_STATES && !what; k++) {
            if (shared->sums[k] != expected[k]) what = "another state";
        }
        if (!what && shared->steps != steps) what = "another number of steps";
        if (!what && power->bad) what = "written without an erase";
        if (!what) {
            memcpy(flash, kept, FLASH_BYTES);
            (void)run(start, 1u + number() % operations, number() % 4u);
            (void)run(start_old, 0, 0);
            const int is_old = shared->old == 0 && shared->old_state == state;
            (void)run(start, 0, 0);
            if (shared->migrated == 0 && !is_old) what = "neither the old state nor the new one";
        }
        if (what) printf("trial %u: %s: resume %d migrate %d\n", trial, what, shared->resumed, shared->migrated);
    }
    printf("%u trials\n", trials);
    return 0;
}
