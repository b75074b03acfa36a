/* Inputs with elements that are not finite: `numbers`. Every function that reads them refuses them, and changes neither
   state nor storage nor samples; then the same inputs with finite elements are taken. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "pm.h"
#define PM_FLASH_DRIVER
#include "port/pm_pages.h"

enum { ELEMENTS = 4096, OFFERS = 12 };

static unsigned char storage[PM_STORED_BYTES * (sizeof(pm_real) / 4u) + 1u], before[sizeof storage];
static pm_real values[PM_INPUTS][ELEMENTS], state[PM_STATES][ELEMENTS], some[ELEMENTS];
static const void *inputs[PM_INPUTS];

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    memcpy(to, storage + address, bytes);
    return PM_OK;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    memcpy(storage + address, from, bytes);
    return PM_OK;
}

#if PM_MAPPED
const void *pm_storage_address(uint32_t address)
{
    return storage + address;
}
#endif

static size_t bytes_of(int index)
{
    const uint32_t size = pm_states_info[index].integer_bytes;
    return pm_states_info[index].elements * (size ? size : sizeof(pm_real));
}

static void note(void)
{
    memcpy(before, storage, sizeof before);
    for (int k = 0; k < PM_STATES; k++) {
        if (pm_read_state(k, state[k])) abort();
    }
}

static int changed(void)
{
    for (int k = 0; k < PM_STATES; k++) {
        if (pm_read_state(k, some) || memcmp(some, state[k], bytes_of(k))) return 1;
    }
    return PM_COMMIT && memcmp(before, storage, sizeof before);
}

static int sliced(void)
{
    int error = pm_step_begin(inputs, (pm_real)0.1);
    while (!error && (error = pm_step_some(1)) == PM_MORE) error = PM_OK;
    return error;
}

/* Returns which function takes inputs that it should refuse, 0 if none does. */
static int takes(int is_of_model)
{
    pm_real loss = -7;
    uint32_t number = 77;
    if (pm_step(inputs, (pm_real)0.1, &loss) != PM_ERROR_NUMBER || loss != -7 || changed()) return 1;
    if (sliced() != PM_ERROR_NUMBER || changed()) return 2;
#if PM_OUTPUTS
    if (is_of_model && (pm_infer(inputs, some) != PM_ERROR_NUMBER || changed())) return 3;
#endif
#if PM_EVALUATES
    if (pm_evaluate(inputs, &loss, &number) != PM_ERROR_NUMBER || loss != -7 || number != 77 || changed()) return 4;
#endif
#if PM_REPLAY
    const uint32_t seen = pm_seen, samples = pm_samples();
    for (int k = 0; k < OFFERS; k++) {
        if (pm_keep_sample(inputs, &number) != PM_ERROR_NUMBER || number != 77) return 5;
    }
    if (pm_seen != seen || pm_samples() != samples || changed()) return 6;
#endif
    (void)is_of_model, (void)number;
    return 0;
}

int main(void)
{
    const pm_real bad[] = {(pm_real)NAN, -(pm_real)NAN, (pm_real)INFINITY, -(pm_real)INFINITY};
    pm_real loss;
    for (int k = 0; k < PM_INPUTS; k++) {
        inputs[k] = values[k];
        for (uint32_t i = 0; i < pm_inputs_info[k].elements && !pm_inputs_info[k].integer_bytes; i++) {
            values[k][i] = (pm_real)(i % 5u) / 4 - (pm_real)0.5;
        }
    }
    if (pm_init() || pm_step(inputs, (pm_real)0.1, &loss)) return 10;
#if PM_REPLAY
    for (int k = 0; k < 2; k++) {
        if (pm_keep_sample(inputs, 0)) return 11;
    }
#endif
    for (int round = 0; round < 2; round++) {
        note();
        for (int k = 0; k < PM_INPUTS; k++) {
            const uint32_t last = pm_inputs_info[k].elements - 1u;
            for (int at = 0; at < 8 && !pm_inputs_info[k].integer_bytes; at++) {
                pm_real *const place = &values[k][at % 2 ? last : last / 3u];
                const pm_real good = *place;
                *place = bad[at / 2];
                const int wrong = takes(k == 0);
                *place = good;
                if (wrong) return printf("input %d: function %d takes %g\n", k, wrong, (double)bad[at / 2]), 1;
            }
        }
#if PM_BEST
        for (int k = 0; k < 4; k++) {
            if (pm_keep_best(bad[k]) != PM_ERROR_NUMBER || changed()) return 12;
        }
        if (pm_best(&loss, 0) != (round ? PM_OK : PM_ERROR_EMPTY) || pm_keep_best(1)) return 13;
#endif
#if PM_REPLAY
        for (int k = 0; k < OFFERS && !round; k++) { /* more than there is space for: then some are not stored */
            if (pm_keep_sample(inputs, 0)) return 14;
        }
#endif
        if (pm_step(inputs, (pm_real)0.1, &loss)) return 15;
    }
    puts("refused");
    return 0;
}
