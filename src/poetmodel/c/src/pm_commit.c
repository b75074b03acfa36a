/* Commits: one of the generations of state on storage is complete at any time, also after a power cut. Each begins
   with a record and ends with a seal: it is complete if both are valid. The newest complete one has the state. */
#include "pm_generation.h"
#include "pm_runtime.h"
#if PM_BEST || PM_REPLAY
#include "pm_state.h"
#endif

#if PM_COMMIT

_Static_assert(sizeof(pm_record_t) == PM_RECORD_BYTES && sizeof(pm_seal_t) == PM_SEAL_BYTES, "sizes of pm_driver.h");

uint32_t pm_generation, pm_next;
uint32_t pm_numbers[2]; /* of the complete generation, and of the next one */
uint32_t pm_commits, pm_steps;
static uint32_t pm_run;
static pm_record_t pm_begun; /* record of the next generation; its number is 0 until the record is written */

#if PM_RANDOM
#define PM_RANDOM_FROM(step) (pm_random_step = (step))
#else
#define PM_RANDOM_FROM(step) ((void)0)
#endif

/* Buffer for transfers of records and seals, with cache lines of its own, like all data in the arena. */
static union {
    pm_record_t record;
    pm_seal_t seal;
    unsigned char lines[(PM_RECORD_BYTES + PM_ALIGNMENT - 1u) / PM_ALIGNMENT * PM_ALIGNMENT];
} pm_moving __attribute__((aligned(PM_ALIGNMENT)));

static uint32_t pm_record_slot(uint32_t generation)
{
    return PM_PAGE_SLOTS + generation * PM_STATE_SLOTS;
}

static uint32_t pm_seal_slot(uint32_t generation)
{
    return pm_record_slot(generation) + PM_STATE_SLOTS - 1u;
}

/* The purpose of a generation: current state, or best state. */
typedef enum { PM_RUNNING, PM_KEPT } pm_kind;

_Static_assert(PM_GENERATIONS <= PM_COUNT_BITS + 1u, "PM_GENERATIONS: 4096 at most");

/* Returns the layout of this build: a build with fewer generations may not find the newest one. */
static uint32_t pm_layout(pm_kind kind)
{
    return pm_layout_hash(PM_LAYOUT_ID, PM_COMMIT_UNIT, PM_COMMIT_BLOCK, PM_STATE_SUMS, PM_SHARED, (uint32_t)kind) |
           (PM_GENERATIONS - 1u);
}

static int pm_is_layout(uint32_t layout, pm_kind kind)
{
    const uint32_t own = pm_layout(kind);
    return (layout & ~PM_COUNT_BITS) == (own & ~PM_COUNT_BITS) && (layout & PM_COUNT_BITS) <= (own & PM_COUNT_BITS);
}

static pm_seal_t pm_seal(pm_kind kind, const pm_record_t *record)
{
    return pm_seal_of(record, PM_INSTANCE_ID, PM_STEP_ID, pm_layout(kind) & ~PM_COUNT_BITS);
}

/* The generations found on storage. */
typedef struct {
    pm_record_t newest; /* newest complete generation below a number; its number is 0 if there is none */
    uint32_t generation;
    uint32_t last;   /* the highest number of all generations that were ever complete, 0 if none */
    uint32_t begun;  /* the highest number of all begun generations */
    uint32_t highest; /* the highest number or run in all records, also those of other programs */
    int is_new_run;  /* whether the last one is damaged, and the first since its pm_init */
    int is_damaged;  /* whether the driver reports damage */
    int is_other;    /* whether a record is of another step, instance or layout */
} pm_records_t;

static uint32_t pm_higher(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* Reads a record or a seal to pm_moving. If storage reports damage, sets found->is_damaged, and returns PM_OK with
   zeros, which are invalid. With is_short_none, as for pm_init, a short read also results in zeros: a new file may be
   shorter than its final size. */
static int pm_read_end(uint32_t slot, uint32_t bytes, int is_short_none, pm_records_t *found)
{
    int error = pm_page_in(slot, &pm_moving, bytes);
    if (!error) error = pm_page_wait(slot);
    if (error == PM_ERROR_CHECKSUM) found->is_damaged = 1;
    if (error == PM_ERROR_CHECKSUM || (error == PM_ERROR_SHORT && is_short_none)) {
        memset(&pm_moving, 0, sizeof pm_moving);
        return PM_OK;
    }
    return error ? pm_page_error(error) : PM_OK;
}

static uint32_t pm_wrong_bytes(uint32_t a, uint32_t b)
{
    uint32_t wrong = 0;
    for (uint32_t bits = a ^ b; bits; bits >>= 8) wrong += (bits & 0xFFu) != 0;
    return wrong;
}

/* Returns the number in a mark, 0 if the mark is invalid. */
static uint32_t pm_number_of(uint32_t mark)
{
    const uint32_t number = mark ^ PM_MARK, first = mark ^ PM_FIRST_MARK;
    return number < PM_MOST_COMMITS ? number : first < PM_MOST_COMMITS ? first : 0;
}

/* Reads record and seal of one generation, and updates `found`. A seal is valid even if one of its bytes has changed
   since it was written: all other data was written before. Only numbers below `below` can be the newest. */
static int pm_read_generation(pm_kind kind, uint32_t generation, uint32_t below, int is_short_none, pm_records_t *found)
{
    PM_TRY(pm_read_end(pm_record_slot(generation), PM_RECORD_BYTES, is_short_none, found));
    const pm_record_t record = pm_moving.record;
    const int is_sound = record.checksum == pm_record_sum(&record);
    const uint32_t high = pm_higher(record.number, record.run);
    if (is_sound && high < PM_MOST_COMMITS) found->highest = pm_higher(found->highest, high);
    if (is_sound && (record.instance_id != PM_INSTANCE_ID || record.step_id != PM_STEP_ID ||
                     !pm_is_layout(record.layout_id, kind) || record.number == 0)) {
        found->is_other = 1;
        return PM_OK;
    }

    PM_TRY(pm_read_end(pm_seal_slot(generation), PM_SEAL_BYTES, is_short_none, found));
    const pm_seal_t seal = pm_seal(kind, &record);
    const uint32_t mark = pm_moving.seal.mark, right = seal.mark;
    const uint32_t again = pm_moving.seal.check ^ seal.check ^ right; /* copy of the mark */
    if (is_sound) {
        const int is_whole = pm_wrong_bytes(mark, right) + pm_wrong_bytes(again, right) <= 1u;
        found->begun = pm_higher(found->begun, record.number);
        if (is_whole && record.number > found->last) {
            found->last = record.number;
            found->is_new_run = 0;
        }
        if (is_whole && record.number < below && record.number > found->newest.number) {
            found->newest = record;
            found->generation = generation;
        }
        return PM_OK;
    }
    const uint32_t read = pm_number_of(mark) ? mark : again, number = pm_number_of(read);
    if (pm_wrong_bytes(mark, again) <= 1u && number > found->last) {
        found->last = number;
        found->is_new_run = (read ^ PM_FIRST_MARK) < PM_MOST_COMMITS;
    }
    return PM_OK;
}

static int pm_read_records(uint32_t below, int is_short_none, pm_records_t *found)
{
    memset(found, 0, sizeof *found);
    found->generation = PM_GENERATIONS - 1u;
    for (uint32_t generation = 0; generation < PM_GENERATIONS; generation++) {
        PM_TRY(pm_read_generation(PM_RUNNING, generation, below, is_short_none, found));
    }
    found->begun = pm_higher(found->begun, found->last);
    return PM_OK;
}

/* Returns the place to write after a place: the next one in its block, or the first one in the next block, which its
   first write erases. There are at least two blocks, so that the block of the complete
   generation is not erased. */
static uint32_t pm_place_after(uint32_t place)
{
    const uint32_t blocks = (PM_GENERATIONS + PM_SHARED - 1u) / PM_SHARED;
    const int is_in_block = (place + 1u) % PM_SHARED && place + 1u < PM_GENERATIONS;
    return is_in_block ? place + 1u : (place / PM_SHARED + 1u) % blocks * PM_SHARED;
}

/* Moves pm_next past places to which a step has written, and that were not erased since. */
static int pm_pass_begun(pm_records_t *found)
{
    while (pm_next % PM_SHARED) {
        uint32_t cleared = 0xFFFFFFFFu, words[PM_RECORD_BYTES / 4u];
        PM_TRY(pm_read_end(pm_record_slot(pm_next), PM_RECORD_BYTES, 1, found));
        memcpy(words, &pm_moving, sizeof words);
        for (uint32_t k = 0; k < PM_RECORD_BYTES / 4u; k++) cleared &= words[k];
        if (cleared == 0xFFFFFFFFu) break;
        pm_next = pm_place_after(pm_next);
    }
    return PM_OK;
}

/* Makes a generation the complete one, with the counters of its record, and sets the next one; `begun` is the highest
   number so far. A record of zeros is the state before the first commit after pm_init. */
static void pm_take(const pm_record_t *record, uint32_t generation, uint32_t begun)
{
    pm_generation = generation;
    pm_next = pm_place_after(generation);
    pm_numbers[0] = record->number;
    pm_numbers[1] = begun + 1u;
    pm_run = record->run;
    pm_commits = record->commits;
    pm_steps = record->steps;
    pm_begun.number = 0;
    PM_RANDOM_FROM(pm_steps);
}

uint32_t pm_run_number(void)
{
    return pm_run;
}

#if PM_BEST
static int pm_find_best(pm_records_t *found);
#endif

/* Begins a new run. Its number is above `above`, and above all numbers that storage still has of any program: samples
   and best states of other runs never belong to it. */
static int pm_begin_run(uint32_t above, pm_records_t *found)
{
    static const pm_record_t none = {0, 0, 0, 0, 0, 0, 0, 0};
    PM_TRY(pm_read_records(0xFFFFFFFFu, 1, found));
    above = pm_higher(above, pm_higher(found->begun, found->highest));
#if PM_BEST
    pm_records_t best;
    PM_TRY(pm_find_best(&best));
    above = pm_higher(above, best.highest);
#endif
#if PM_REPLAY
    uint32_t run;
    PM_TRY(pm_replay_highest_run(&run));
    if (run < PM_MOST_COMMITS) above = pm_higher(above, run);
#endif
    pm_take(&none, found->generation, above);
    return PM_OK;
}

#if PM_MIGRATES
int pm_commit_clear_at(uint32_t place, uint32_t steps, uint32_t above)
{
    pm_records_t found;
    PM_TRY(pm_begin_run(above, &found));
    pm_next = place;
    pm_steps = steps;
    return PM_OK;
}
#endif

int pm_commit_clear(void)
{
    pm_records_t found;
    PM_TRY(pm_begin_run(0, &found));
    return pm_pass_begun(&found);
}

static int pm_write_end(uint32_t slot, uint32_t bytes)
{
    PM_TRY_PAGE(pm_page_out(slot, &pm_moving, bytes));
    PM_TRY_PAGE(pm_page_wait(slot));
    return PM_OK;
}

static int pm_write_record(uint32_t slot, pm_record_t *record)
{
    record->checksum = pm_record_sum(record);
    pm_moving.record = *record;
    return pm_write_end(slot, PM_RECORD_BYTES);
}

static int pm_write_seal(pm_kind kind, uint32_t generation, const pm_record_t *record)
{
    pm_moving.seal = pm_seal(kind, record);
    return pm_write_end(pm_seal_slot(generation), PM_SEAL_BYTES);
}

int pm_commit_begin(uint32_t steps)
{
    const uint32_t commits = pm_commits + (steps || !pm_commits ? 1u : 0u);
    if (pm_begun.number) { /* writes of this attempt do not belong to the attempt before */
        pm_numbers[1]++;
        if (pm_next % PM_SHARED) pm_next = pm_place_after(pm_next);
    }
    const uint32_t slot = pm_record_slot(pm_next), number = pm_numbers[1], run = pm_commits ? pm_run : number;
    const pm_record_t record = {PM_INSTANCE_ID, PM_STEP_ID, pm_layout(PM_RUNNING), number, run, commits,
                                pm_steps + steps, 0};
    pm_begun = record;
    return pm_write_record(slot, &pm_begun);
}

int pm_commit(void)
{
    PM_TRY(pm_write_seal(PM_RUNNING, pm_next, &pm_begun));
    pm_take(&pm_begun, pm_next, pm_numbers[1]);
    return PM_OK;
}

int pm_resume(void)
{
    pm_records_t found;
    uint32_t below = 0xFFFFFFFFu, last = 0, begun = 0, run = 0;
    pm_commits = 0;
    pm_holds = PM_HOLDS_NOTHING;
    for (;;) {
        PM_TRY(pm_read_records(below, 0, &found));
        if (below == 0xFFFFFFFFu) {
            last = found.last;
            begun = found.begun;
            run = found.newest.run;
        }
        if (found.newest.number == 0 || found.newest.run != run || found.is_new_run) {
            if (last || found.is_damaged) return PM_ERROR_CHECKSUM;
            return found.is_other ? PM_ERROR_OTHER : PM_ERROR_EMPTY;
        }
        pm_take(&found.newest, found.generation, begun);
        PM_TRY(pm_pass_begun(&found));
        const int error = pm_load_state();
        if (error != PM_ERROR_CHECKSUM) return error ? error : pm_numbers[0] == last ? PM_OK : PM_RESUMED_OLDER;
        below = found.newest.number;
    }
}

#if PM_BEST
/* The best generation has one of two places after those of the generations that take turns, so that it stays
   complete if a power cut interrupts the write of the next best one. Its record has the loss in place of the number
   of commits. */
static int pm_find_best(pm_records_t *found)
{
    memset(found, 0, sizeof *found);
    for (uint32_t k = 0; k < 2u; k++) {
        PM_TRY(pm_read_generation(PM_KEPT, PM_BEST_PLACE(k), 0xFFFFFFFFu, 1, found));
    }
    found->begun = pm_higher(found->begun, found->last);
    return PM_OK;
}

int pm_best(pm_real *loss, uint32_t *steps)
{
    pm_records_t found;
    float kept;
    if (pm_holds == PM_HOLDS_NOTHING) return PM_ERROR_STATE;
    PM_TRY(pm_find_best(&found));
    if (found.newest.number == 0 || found.newest.run != pm_run) return PM_ERROR_EMPTY;
    memcpy(&kept, &found.newest.commits, sizeof kept);
    *loss = (pm_real)kept;
    if (steps) *steps = found.newest.steps;
    return PM_OK;
}

int pm_keep_best(pm_real loss)
{
    pm_records_t found;
    const float kept = (float)loss;
    if (!pm_is_finite((pm_real)kept)) return PM_ERROR_NUMBER;
    PM_TRY(pm_commit_now()); /* so that the current generation has the current state */
    PM_TRY(pm_find_best(&found));
    const uint32_t place = PM_BEST_PLACE(found.newest.number && found.generation == PM_BEST_PLACE(0u) ? 1u : 0u);
    const uint32_t next = pm_next, number = pm_numbers[1];
    pm_record_t record = {PM_INSTANCE_ID, PM_STEP_ID, pm_layout(PM_KEPT), found.begun + 1u, pm_run, 0, pm_steps, 0};
    memcpy(&record.commits, &kept, sizeof kept);
    pm_next = place;
    pm_numbers[1] = record.number;
    int error = pm_write_record(pm_record_slot(place), &record);
    if (!error) error = pm_copy_state(0);
    if (!error) error = pm_write_seal(PM_KEPT, place, &record);
    pm_next = next;
    pm_numbers[1] = number;
    return error;
}

int pm_restore_best(void)
{
    pm_records_t found;
    if (pm_holds != PM_HOLDS_STATE) return PM_ERROR_STATE;
    if (pm_progress.slice) return PM_ERROR_BUSY;
    PM_TRY(pm_find_best(&found));
    if (found.newest.number == 0 || found.newest.run != pm_run) return PM_ERROR_EMPTY;
    const uint32_t generation = pm_generation, number = pm_numbers[0];
    PM_TRY(pm_commit_begin(0));
    pm_generation = found.generation;
    pm_numbers[0] = found.newest.number;
    int error = pm_copy_state(1);
    pm_generation = generation;
    pm_numbers[0] = number;
    if (!error) error = pm_commit();
    if (error) pm_holds = PM_HOLDS_TORN; /* state in RAM is partly new */
    return error ? PM_TORN : PM_OK;
}
#endif

#endif
