/* Cuts the power in operations of flash, and holds what comes after the restart to what was done before: `cuts FIRST COUNT`.
   A trial has one cut, several one after the other, or a flash that fails for a while, to which the application writes
   again and again, before the cut. A trial prints nothing but for a fault. */
#define _GNU_SOURCE
#include "pm.h"
#define PM_FLASH_DRIVER
#include "port/pm_pages.h"
#define FLASH_BYTES PM_STORED_BYTES
#define FLASH_UNIT PM_STORAGE_UNIT
#define FLASH_BLOCK PM_STORAGE_BLOCK
#include "cut_flash.h"

#ifndef STEPS
#define STEPS 5u
#endif

typedef struct {
    int resumed, error, done;    /* what pm_resume said, the first error after, whether all steps are */
    uint32_t steps, state, end;                     /* pm_steps after the start, and the state then and at the end */
    uint32_t restores, best, restored; /* whether the best state is restored; the step of it, and the state then */
} shared_t;

static shared_t *shared;
static uint32_t expected[STEPS + 1], operations[STEPS + 1]; /* after each step */

int pm_storage_read(uint32_t address, void *to, uint32_t count)
{
    return read_flash(address, to, count);
}

int pm_storage_write(uint32_t address, const void *from, uint32_t count)
{
    return write_flash(address, from, count, PM_ERROR_PAGE);
}

#if PM_MAPPED
const void *pm_storage_address(uint32_t address)
{
    return flash + address;
}
#endif

static uint32_t state(void)
{
    static pm_real values[ELEMENTS];
    uint32_t sum = 0;
    for (int k = 0; k < PM_STATES; k++) {
        if (pm_read_state(k, values)) abort();
        const uint32_t each = pm_states_info[k].integer_bytes ? pm_states_info[k].integer_bytes : sizeof(pm_real);
        sum = pm_checksum(sum, values, pm_states_info[k].elements * each);
    }
    return sum;
}

static int step(uint32_t batch)
{
    static pm_real values[PM_INPUTS][ELEMENTS];
    const void *inputs[PM_INPUTS];
    pm_real loss;
    for (int k = 0; k < PM_INPUTS; k++) {
        inputs[k] = values[k];
        for (uint32_t i = 0; i < pm_inputs_info[k].elements && !pm_inputs_info[k].integer_bytes; i++) {
            values[k][i] = (pm_real)((i * 7u + batch * 13u) % 17u) / 8 - 1;
        }
    }
    return pm_step(inputs, (pm_real)0.05, &loss);
}

#if PM_BEST
/* Keeps the state after two steps, each better than what was kept before; again where storage fails. */
static int keep(void)
{
    int error = PM_OK;
    for (int more = 60; more && (pm_steps == 2u || pm_steps == 4u); more--) {
        uint32_t kept = 0;
        pm_real loss = 0;
        error = pm_best(&loss, &kept);
        if (!error && loss != (pm_real)kept) abort();
        if (!error && kept >= pm_steps) break;
        if (!error || error == PM_ERROR_EMPTY) error = pm_keep_best((pm_real)pm_steps);
        if (!error) break;
    }
    return error;
}

static int restore(void)
{
    pm_real loss;
    const uint32_t steps = pm_steps;
    int error = pm_best(&loss, &shared->best);
    if (!error) error = pm_restore_best();
    if (!error) shared->restored = state();
    if (!error && (pm_resume() || state() != shared->restored || pm_steps != steps)) abort();
    return error;
}
#else
static int keep(void)
{
    return PM_OK;
}

static int restore(void)
{
    return PM_OK;
}
#endif

/* An application, from its start to the end of some steps. */
static void train(uint32_t steps)
{
    int error = shared->resumed = pm_resume();
    if (error == PM_RESUMED_OLDER) error = PM_OK;
    if (error == PM_ERROR_EMPTY) error = pm_init();
    if (!error) shared->steps = pm_steps, shared->state = state(), error = keep();
    while (!error && pm_steps < steps) {
        error = step(pm_steps);
        if (error == PM_TORN) error = pm_resume();
        else if (error == PM_ERROR_PAGE) error = PM_OK; /* state is as before: again */
        if (!error) error = keep();
    }
    if (!error) shared->end = state();
    if (!error && shared->restores) error = restore();
    shared->done = !error;
    _exit(shared->error = error);
}

static int run(uint32_t steps, uint32_t cut_at, uint32_t kind, uint32_t fails)
{
    power->fails = fails, shared->done = 0;
    return run_cut(train, steps, cut_at, kind);
}

static void fault(uint32_t trial, const char *what)
{
    printf("trial %u: %s: resume %d error %d steps %u\n", trial, what, shared->resumed, shared->error, shared->steps);
}

/* One trial of those with a number: a cut in the record, in the seal, in any operation, or up to four of these. */
static void try_cuts(uint32_t trial)
{
    uint32_t whole = 0; /* steps that are whole for sure */
    int is_begun = 0;   /* whether a first generation is */
    memset(flash, trial % 3u ? 0xFF : 0x5A, PM_STORED_BYTES);
    power->random = trial * 2654435761u, power->bad = 0;
    for (uint32_t more = trial % 4u == 3u ? 4u : 1u; more; more--) {
        const uint32_t target = number() % (STEPS + 1u), end = operations[target];
        const uint32_t near = number() % 3u, kind = number() % KINDS;
        const uint32_t cut = near == 0 && end > 4u ? end - number() % 4u : 1u + number() % operations[STEPS];
        const int is_first = !is_begun && whole == 0 && more == (trial % 4u == 3u ? 4u : 1u);
        const uint32_t after = cut > operations[0] ? cut - operations[0] - 1u : 0;
        const uint32_t fails = trial % 4u == 2u ? after < 40u ? after : 40u : 0; /* pm_init has done its part before */
        if (run(STEPS, cut, kind, fails) != CUT) {
            if (!shared->done) fault(trial, "no cut, and no end");
            continue;
        }
        for (uint32_t k = 0; is_first && k <= STEPS; k++) {
            if (operations[k] < cut - fails) whole = k, is_begun = 1;
        }
    }
    int status = run(STEPS, 0, 0, 0);
    const int may_be_empty = !is_begun && (shared->resumed == PM_ERROR_EMPTY || shared->resumed == PM_OK);
    if (status || !shared->done) fault(trial, "no end");
    else if (shared->resumed != PM_OK && !may_be_empty) fault(trial, "what is whole is not resumed");
    else if (shared->steps < whole) fault(trial, "steps are lost");
    else if (shared->state != expected[shared->steps]) fault(trial, "another state");
    else if (shared->end != expected[STEPS]) fault(trial, "another end");
    else if (power->bad) fault(trial, "written without an erase");
    if (PM_BEST == 0) return;
    shared->restores = 1;
    (void)run(STEPS, 1u + number() % 40u, number() % KINDS, 0); /* cut while the best is restored, or not at all */
    status = run(STEPS, 0, 0, 0);
    shared->restores = 0;
    if (status || shared->resumed) fault(trial, "the best is not restored");
    else if (shared->state != expected[STEPS] && shared->state != expected[4]) fault(trial, "a restored mixture");
    else if (shared->best != 4u || shared->restored != expected[4]) fault(trial, "another best");
    else if (power->bad) fault(trial, "written without an erase");
}

int main(int count, char **words)
{
    if (count != 3) return 2;
    shared = map_flash(sizeof *shared);
    for (uint32_t k = 0; k <= STEPS; k++) {
        memset(flash, 0xFF, PM_STORED_BYTES);
        if (run(k, 0, 0, 0) || shared->resumed != PM_ERROR_EMPTY || power->bad) return 3;
        expected[k] = shared->end, operations[k] = power->operations;
    }
    const uint32_t first = (uint32_t)atoi(words[1]), trials = (uint32_t)atoi(words[2]);
    for (uint32_t trial = first; trial < first + trials; trial++) try_cuts(trial);
    printf("%u trials\n", trials);
    return 0;
}
