/* Stored samples over NOR flash of its own. `replay bits`: steps on stored samples leave the state of steps on their
   batches, whole and in slices. `replay cuts FIRST COUNT`: whatever a power cut stops, the samples are those of before or
   with one more, or before or after one is dropped. `replay chance`: all that were offered are equally likely to be there.
   `replay damage`: draws pass over damaged samples, which can be dropped. */
#define _GNU_SOURCE
#include "pm.h"
#define PM_FLASH_DRIVER
#include "port/pm_pages.h"
#define FLASH_BYTES (PM_STORED_BYTES * (uint32_t)(sizeof(pm_real) / 4u))
#define FLASH_UNIT PM_STORAGE_UNIT
#define FLASH_BLOCK PM_STORAGE_BLOCK
#include "cut_flash.h"

static uint32_t seed;
#define PM_SEED seed
#include "src/pm_replay.c"

enum { OFFERS = 3 * PM_REPLAY, DROP_AT = PM_REPLAY + 3, DROPPED = 2 }; /* after so many offers, one is dropped */

typedef struct {
    uint32_t seen, samples, done;
    int resumed, error;
    pm_real losses[PM_REPLAY]; /* of each sample */
} shared_t;

static shared_t *shared;
static uint32_t number_of[OFFERS + 1][PM_REPLAY]; /* after so many offers, the batch of each sample */
static uint32_t before_drop[PM_REPLAY];
static pm_real loss_of[OFFERS];

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

static const void *inputs[PM_INPUTS];

static void batch(uint32_t of)
{
    static pm_real values[PM_INPUTS][ELEMENTS];
    for (int k = 0; k < PM_INPUTS; k++) {
        inputs[k] = values[k];
        for (uint32_t i = 0; i < pm_inputs_info[k].elements; i++) {
            if (pm_inputs_info[k].integer_bytes) ((int32_t *)(void *)values[k])[i] = (int32_t)((i + of) % 4u);
            else values[k][i] = (pm_real)(((i + 1u) * (2u * of + 7u) * 2654435761u >> 16) % 17u) / 8 - 1;
        }
    }
}

static uint32_t state(void)
{
    static pm_real values[ELEMENTS];
    uint32_t sum = 0;
    for (int k = 0; k < PM_STATES; k++) {
        if (pm_read_state(k, values)) abort();
        sum = pm_checksum(sum, values, pm_states_info[k].elements * (uint32_t)sizeof(pm_real));
    }
    return sum;
}

/* -- bits -------------------------------------------------------------------------------------- */

static int bits(void)
{
    pm_real loss, first[PM_REPLAY];
    uint32_t index;
    if (pm_init()) return 1;
    for (uint32_t k = 0; k < PM_REPLAY; k++) {
        batch(k);
        if (pm_step(inputs, (pm_real)0.1, &first[k])) return 2;
    }
    const uint32_t whole = state();
    for (int sliced = 0; sliced < 2; sliced++) {
        if (pm_init() || pm_samples() || pm_step_stored(0, (pm_real)0.1, &loss) != PM_ERROR_EMPTY) return 3;
        const uint32_t before = state();
        for (uint32_t k = 0; k < PM_REPLAY; k++) {
            batch(k);
            if (pm_keep_sample(inputs, &index) || index != k || pm_samples() != k + 1u) return 4;
        }
        if (state() != before || pm_step_stored(PM_REPLAY, 0, &loss) != PM_ERROR_INDEX) return 5;
        memset((void *)(uintptr_t)inputs[0], 0xFF, 64); /* what was offered is not read again */
        for (uint32_t k = 0; k < PM_REPLAY; k++) {
            int error = PM_OK;
            if (sliced) {
                error = pm_step_stored_begin(k, (pm_real)0.1);
                while (!error && (error = pm_step_some(1)) == PM_MORE) error = PM_OK;
                loss = pm_loss();
            } else {
                error = pm_step_stored(k, (pm_real)0.1, &loss);
            }
            if (error || loss != first[k]) return 6;
        }
        if (state() != whole) return 7;
    }
    batch(1);
    ((int32_t *)(void *)(uintptr_t)inputs[1])[0] = 77; /* no such class */
    seed = 5;
    for (int more = 0; more < 9; more++) {
        const int error = pm_keep_sample(inputs, &index);
        if (error != PM_OK && error != PM_ERROR_INPUT) return 8;
        if (error == PM_OK && index != PM_NO_SAMPLE) return 9;
    }
    if (pm_step_stored(PM_ANY_SAMPLE, (pm_real)0.1, &loss)) return 10;
    puts("equal");
    return 0;
}

/* -- power cuts --------------------------------------------------------------------------------- */

#if !PM_COMMIT
static int pm_resume(void)
{
    return PM_ERROR_EMPTY;
}
#endif

/* An application that offers batches until so many were, and says which samples there are then. */
static void offer(uint32_t offers)
{
    int error = shared->resumed = pm_resume();
    uint32_t index;
    pm_real loss;
    if (error == PM_ERROR_EMPTY) error = pm_init();
    shared->seen = pm_seen, shared->samples = pm_samples();
    while (!error && pm_seen < offers) {
        batch(pm_seen);
        if (pm_seen == DROP_AT && pm_samples() == PM_REPLAY) error = pm_drop_sample(DROPPED);
        if (!error) error = pm_keep_sample(inputs, &index);
        if (!error && pm_seen % 5u == 0) error = pm_step_stored(PM_ANY_SAMPLE, 0, &loss); /* a rate of 0 */
    }
    for (uint32_t k = 0; !error && k < pm_samples(); k++) error = pm_step_stored(k, 0, &shared->losses[k]);
    shared->error = error;
    shared->done = !error;
    _exit(error);
}

static int run(uint32_t offers, uint32_t cut_at, uint32_t kind)
{
    shared->done = 0;
    return run_cut(offer, offers, cut_at, kind);
}

static int cuts(uint32_t first, uint32_t count)
{
    memset(flash, 0xFF, FLASH_BYTES);
    if (run(OFFERS, 0, 0) || power->bad) return 3;
    const uint32_t operations = power->operations;
    for (uint32_t trial = first; trial < first + count; trial++) {
        const char *what = 0;
        memset(flash, trial % 3u ? 0xFF : 0x5A, FLASH_BYTES);
        power->random = trial * 2654435761u, power->bad = 0;
        for (uint32_t more = 1u + trial % 3u; more; more--) (void)run(OFFERS, 1u + number() % operations, number() % 4u);
        /* What is there now, and then all of it, without a cut. */
        const int error = run(0, 0, 0);
        const uint32_t seen = shared->seen, samples = shared->samples;
        const uint32_t *const numbers = seen == DROP_AT && samples == PM_REPLAY ? before_drop : number_of[seen];
        const uint32_t fewest = seen == DROP_AT ? PM_REPLAY - 1u : seen;
        if (error || (shared->resumed && shared->resumed != PM_ERROR_EMPTY)) what = "no start";
        if (!what && (samples < fewest ? samples < PM_REPLAY : samples > PM_REPLAY)) what = "another number";
        for (uint32_t k = 0; !what && k < samples; k++) {
            if (shared->losses[k] != loss_of[numbers[k]]) what = "another sample";
        }
        if (!what && (run(OFFERS, 0, 0) || !shared->done)) what = "no end";
        for (uint32_t k = 0; !what && k < PM_REPLAY; k++) {
            if (shared->losses[k] != loss_of[number_of[OFFERS][k]]) what = "another sample at the end";
        }
        if (power->bad) what = "written without an erase";
        if (what) printf("trial %u: %s: resume %d error %d seen %u\n", trial, what, shared->resumed, shared->error, seen);
    }
    printf("%u trials\n", count);
    return 0;
}

/* The losses of all batches, and which of them each sample is after each offer: by a run in this process. */
static int expect(void)
{
    uint32_t index;
    memset(flash, 0xFF, FLASH_BYTES);
    if (pm_init()) return 1;
    for (uint32_t k = 0; k < OFFERS; k++) {
        batch(k);
        if (pm_step(inputs, 0, &loss_of[k])) return 2;
        for (uint32_t other = 0; other < k; other++) {
            if (loss_of[other] == loss_of[k]) return 3;
        }
    }
    for (uint32_t k = 0; k < OFFERS; k++) {
        batch(k);
        if (k == DROP_AT) {
            memcpy(before_drop, number_of[k], sizeof before_drop);
            if (pm_drop_sample(DROPPED) || pm_samples() != PM_REPLAY - 1u || pm_seen != k) return 5;
            number_of[k][DROPPED] = number_of[k][PM_REPLAY - 1u];
        }
        if (pm_keep_sample(inputs, &index) || (k == DROP_AT && index != PM_REPLAY - 1u)) return 4;
        memcpy(number_of[k + 1u], number_of[k], sizeof number_of[k]);
        if (index != PM_NO_SAMPLE) number_of[k + 1u][index] = k;
    }
    return 0;
}

/* -- damage ------------------------------------------------------------------------------------- */

static unsigned char *byte_of(uint32_t sample, uint32_t offset)
{
    return flash + pm_start_of(PM_SLOTS + places[sample / PM_GROUP_SAMPLES]) + place_of(sample) + offset;
}

/* Returns how many of some draws have an error, or the loss of a damaged sample. */
static int draws(uint32_t damaged, const pm_real *losses, uint32_t *counts)
{
    int wrong = 0;
    memset(counts, 0, PM_REPLAY * sizeof *counts);
    for (uint32_t k = 0; k < 40u * PM_REPLAY; k++) {
        pm_real loss = -1;
        const int error = pm_step_stored(PM_ANY_SAMPLE, 0, &loss);
        wrong += error != 0;
        for (uint32_t i = 0; i < PM_REPLAY; i++) {
            wrong += damaged >> i & (loss == losses[i]);
            counts[i] += loss == losses[i];
        }
    }
    return wrong;
}

static int damage(void)
{
    pm_real losses[PM_REPLAY], loss;
    uint32_t counts[PM_REPLAY];
    if (pm_init() || pm_drop_sample(0) != PM_ERROR_INDEX) return 1;
    for (uint32_t k = 0; k < PM_REPLAY; k++) {
        batch(k);
        if (pm_keep_sample(inputs, 0) || pm_step_stored(k, 0, &losses[k])) return 2;
    }
    *byte_of(1, 5) ^= 1; /* data, and a checksum */
    *byte_of(3, SAMPLE_BYTES - SUM_BYTES * PM_SCALE) ^= 4;
    for (uint32_t k = 0; k < PM_REPLAY; k++) {
        if (pm_step_stored(k, 0, &loss) != (k == 1 || k == 3 ? PM_ERROR_CHECKSUM : PM_OK)) return 3;
    }
    if (draws(1u << 1 | 1u << 3, losses, counts)) return 4;
    for (uint32_t k = 0; k < PM_REPLAY; k++) {
        const uint32_t mean = 40u * PM_REPLAY / (PM_REPLAY - 2u);
        if (k != 1 && k != 3 && (counts[k] < mean / 2u || counts[k] > mean * 2u)) return 5;
    }
    if (pm_step_begin(inputs, 0) || pm_drop_sample(1) != PM_ERROR_BUSY) return 6;
    while (pm_step_some(9) == PM_MORE) continue;
    if (pm_drop_sample(PM_REPLAY) != PM_ERROR_INDEX || pm_drop_sample(3) || pm_drop_sample(1)) return 7;
    /* The last ones have these numbers now, also after a restart. */
    for (int restarts = 0; restarts < 2; restarts++) {
        if (pm_samples() != PM_REPLAY - 2u || pm_seen != PM_REPLAY) return 8;
        for (uint32_t k = 0; k < pm_samples(); k++) {
            const uint32_t was = k == 1 ? PM_REPLAY - 2u : k == 3 ? PM_REPLAY - 1u : k;
            if (pm_step_stored(k, 0, &loss) || loss != losses[was]) return 9;
        }
#if PM_COMMIT
        if (pm_resume()) return 10;
#endif
    }
    /* A whole group is lost: its samples can be dropped, and others take their place. */
    const uint32_t place = places[0];
    places[0] = NO_PLACE;
    find_free(place);
    if (pm_step_stored(0, 0, &loss) != PM_ERROR_CHECKSUM || pm_drop_sample(0) || pm_samples() != PM_REPLAY - 3u) return 11;
    while (pm_samples() < PM_REPLAY) {
        batch(pm_seen);
        if (pm_keep_sample(inputs, 0)) return 12;
    }
    if (draws(0, losses, counts)) return 13;
    while (pm_samples()) {
        if (pm_drop_sample(pm_samples() - 1u)) return 14;
    }
    if (pm_step_stored(PM_ANY_SAMPLE, 0, &loss) != PM_ERROR_EMPTY) return 15;
    batch(1);
    if (pm_keep_sample(inputs, 0) || pm_step_stored(PM_ANY_SAMPLE, 0, &loss) || loss != losses[1]) return 16;
    *byte_of(0, 9) ^= 1; /* then all are damaged */
    if (pm_step_stored(PM_ANY_SAMPLE, 0, &loss) != PM_ERROR_CHECKSUM) return 17;
    puts("passed over");
    return 0;
}

/* -- chance ------------------------------------------------------------------------------------- */

static void chance(void)
{
    static uint32_t counts[OFFERS], drawn[PM_REPLAY];
    for (seed = 0; seed < 4000u; seed++) {
        uint32_t there[PM_REPLAY];
        for (uint32_t k = 0; k < OFFERS; k++) {
            const uint32_t index = k < PM_REPLAY ? k : draw(k, 0, k + 1u);
            if (index < PM_REPLAY) there[index] = k;
        }
        for (uint32_t k = 0; k < PM_REPLAY; k++) counts[there[k]]++;
        drawn[draw(seed % 100u, 1, PM_REPLAY)]++;
    }
    for (uint32_t k = 0; k < OFFERS; k++) printf("%u ", counts[k]);
    puts("");
    for (uint32_t k = 0; k < PM_REPLAY; k++) printf("%u ", drawn[k]);
    puts("");
}

int main(int count, char **words)
{
    if (count < 2) return 2;
    shared = map_flash(sizeof *shared);
    if (strcmp(words[1], "bits") == 0) return bits();
    if (strcmp(words[1], "chance") == 0) return chance(), 0;
    if (strcmp(words[1], "damage") == 0) return damage();
    const int error = expect();
    if (error || count != 4) return 20 + error;
    return cuts((uint32_t)atoi(words[2]), (uint32_t)atoi(words[3]));
}
