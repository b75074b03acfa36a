/* Stored samples in an update from a step `old` to a step `new`, over NOR flash of its own: `carry FIRST COUNT`. Whatever a
   power cut stops, the state and all samples of the old step are there, or those of the new one: SAMPLES, or none if they
   are not taken over (TAKES 0). What either step's init deletes never comes back. */
#define _GNU_SOURCE
#include "new.h"
#include "old.h"
#define FLASH_BYTES (NEW_STORED_BYTES > OLD_STORED_BYTES ? NEW_STORED_BYTES : OLD_STORED_BYTES)
#define FLASH_UNIT NEW_STORAGE_UNIT
#define FLASH_BLOCK NEW_STORAGE_BLOCK
#include "cut_flash.h"

_Static_assert(NEW_OLD_STORED_BYTES == OLD_STORED_BYTES, "the storage of the old step, as the new one computes it");

enum { STEPS = 2, OFFERS = 2 * OLD_REPLAY };

typedef struct {
    int resumed, migrated, error;
    uint32_t steps, samples, seen;
    float losses[OLD_REPLAY];
} shared_t;

static shared_t *shared;
static const void *inputs[NEW_INPUTS];
static uint32_t number_of[OLD_REPLAY]; /* the batch of each sample */

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

static void batch(uint32_t of)
{
    static float values[NEW_INPUTS][ELEMENTS];
    for (int k = 0; k < NEW_INPUTS; k++) {
        inputs[k] = values[k];
        for (uint32_t i = 0; i < new_inputs_info[k].elements; i++) {
            if (new_inputs_info[k].integer_bytes) ((int32_t *)(void *)values[k])[i] = (int32_t)((i + of) % 4u);
            else values[k][i] = (float)(((i + 1u) * (2u * of + 7u) * 2654435761u >> 16) % 17u) / 8 - 1;
        }
    }
}

static int train_old(uint32_t offers)
{
    float loss;
    uint32_t index;
    int error = old_init();
    for (uint32_t k = 0; k < STEPS && !error; k++) {
        batch(k);
        error = old_step(inputs, 0.1f, &loss);
    }
    for (uint32_t k = 0; k < offers && !error; k++) {
        batch(k);
        error = old_keep_sample(inputs, &index);
        if (index != OLD_NO_SAMPLE) number_of[index] = k;
    }
    return error;
}

/* The firmware with the old step, and with the new one; each notes its samples. */
static void look_old(uint32_t begins)
{
    shared->error = shared->resumed = begins ? old_init() : old_resume();
    shared->steps = old_steps, shared->samples = old_samples(), shared->seen = old_seen;
    for (uint32_t k = 0; k < old_samples() && !shared->error; k++) shared->error = old_step_stored(k, 0, &shared->losses[k]);
    _exit(0);
}

static void look_new(uint32_t begins)
{
    shared->resumed = begins == 1u ? new_init() : new_resume();
    shared->migrated = -1;
    int error = shared->resumed;
    if (error == NEW_ERROR_OTHER && begins != 2u) error = shared->migrated = new_migrate();
    shared->steps = new_steps, shared->samples = new_samples(), shared->seen = new_seen;
    for (uint32_t k = 0; k < new_samples() && !error; k++) error = new_step_stored(k, 0, &shared->losses[k]);
    shared->error = error;
    _exit(error);
}

static int run(void (*what)(uint32_t), uint32_t begins, uint32_t cut_at, uint32_t kind)
{
    memset(shared, 0, sizeof *shared);
    shared->error = shared->resumed = -2;
    return run_cut(what, begins, cut_at, kind);
}

/* Returns whether the firmware found so many samples, with the losses of the batches. */
static int has(uint32_t samples, const float *losses)
{
    if (shared->error || shared->samples != samples) return 0;
    for (uint32_t k = 0; k < samples; k++) {
        if (shared->losses[k] != losses[number_of[k]]) return 0;
    }
    return 1;
}

int main(int count, char **words)
{
    static unsigned char kept[FLASH_BYTES];
    static float old_losses[OFFERS], new_losses[OFFERS];
    const char *what = 0;
    if (count != 3) return 2;
    shared = map_flash(sizeof *shared);
    if (train_old(OFFERS)) return 3;
    memcpy(kept, flash, FLASH_BYTES);
    if (run(look_old, 0, 0, 0) || shared->error) return 9;
    memcpy(flash, kept, FLASH_BYTES);
    const uint32_t seen = shared->seen;
    const uint32_t samples = old_samples(), taken = !TAKES ? 0 : samples < NEW_REPLAY ? samples : NEW_REPLAY;
    if (run(look_new, 0, 0, 0) || shared->migrated || shared->steps != STEPS) what = "no migration";
    const uint32_t operations = power->operations;
    if (!what && (shared->samples != taken || (taken && shared->seen != seen))) what = "other samples";
    if (what) return printf("%s: resume %d migrate %d samples %u\n", what, shared->resumed, shared->migrated, shared->samples), 4;
    if (new_resume()) return 5;
    for (uint32_t k = 0; k < OFFERS && taken; k++) {
        batch(k);
        if (new_step(inputs, 0, &new_losses[k])) return 6;
    }
    memcpy(flash, kept, FLASH_BYTES);
    if (old_resume()) return 7;
    for (uint32_t k = 0; k < OFFERS; k++) {
        batch(k);
        if (old_step(inputs, 0, &old_losses[k])) return 8;
    }
    power->bad = 0;
    const uint32_t first = (uint32_t)atoi(words[1]), trials = (uint32_t)atoi(words[2]);
    for (uint32_t trial = first; trial < first + trials; trial++) {
        const uint32_t at = 1u + trial / 4u % operations;
        memcpy(flash, kept, FLASH_BYTES);
        power->random = trial * 2654435761u;
        what = 0;
        if (run(look_new, 0, at, trial % 4u) != CUT) what = "no cut";
        if (!what && trial % 3u == 0 && run(look_new, 0, 1u + number() % operations, number() % 4u) == 1) what = "an error";
        static unsigned char cut[FLASH_BYTES];
        memcpy(cut, flash, FLASH_BYTES);
        (void)run(look_new, 2, 0, 0);
        const int is_new = shared->resumed == 0;
        if (!what && is_new && !has(taken, new_losses)) what = "new state without its samples";
        memcpy(flash, cut, FLASH_BYTES);
        (void)run(look_old, 0, 0, 0);
        if (!what && !is_new && (shared->resumed || shared->steps != STEPS || !has(samples, old_losses))) what = "old state or samples lost";
        memcpy(flash, cut, FLASH_BYTES);
        if (!what && (run(look_new, 0, 0, 0) || !has(taken, new_losses))) what = "no end";
        if (!what && (run(look_new, 2, 0, 0) || !has(taken, new_losses))) what = "others after a restart";
        if (!what && (run(look_new, 1, 0, 0) || shared->samples)) what = "samples after the new init";
        if (!what && (run(look_new, 2, 0, 0) || shared->samples)) what = "samples after the new init and a restart";
        if (!what && (run(look_old, 1, 0, 0) || shared->samples)) what = "samples after the old init";
        if (!what && (run(look_old, 0, 0, 0) || shared->resumed || shared->samples)) what = "samples after the old init and a restart";
        if (!what && power->bad) what = "written without an erase";
        if (what) {
            printf("trial %u of %u: %s: resume %d migrate %d error %d samples %u\n", trial, 4u * operations, what, shared->resumed,
                   shared->migrated, shared->error, shared->samples);
        }
    }
    printf("%u trials\n", trials);
    return 0;
}
