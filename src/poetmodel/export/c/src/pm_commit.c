/* Commits: of the generations of state on storage one is whole, whenever the power goes. Each ends with a record, which
   is written last and counts once its checksum is right; the newest one says where the state is. */
#include <stddef.h>

#include "pm_checksum.h"
#include "pm_runtime.h"

#if PM_COMMIT

/* PM_RECORD_BYTES. The mark is behind the checksum: it is there where all of the record was written once. */
typedef struct {
    uint32_t step_id; /* of another step, or of another order of its state: not ours */
    uint32_t layout_id;
    uint32_t number;  /* counts all commits, from 1 on, over each pm_init too */
    uint32_t run;     /* the number of its pm_init */
    uint32_t commits; /* pm_commits */
    uint32_t steps;   /* pm_steps */
    uint32_t checksum;
    uint32_t mark;
} pm_record_t;

#define PM_MARK 0xA5C31E87u /* of the number: neither 0 nor 0xFFFFFFFF is the mark of one that can be */
#define PM_MOST_COMMITS 0x10000000u

uint32_t pm_generation;
uint32_t pm_numbers[2]; /* of the commit that is whole, and of the next one */
uint32_t pm_commits, pm_steps;
static uint32_t pm_run;

#if PM_RANDOM
extern uint32_t pm_random_step; /* see kernels/pm_random.h */
#define PM_RANDOM_FROM(step) (pm_random_step = (step))
#else
#define PM_RANDOM_FROM(step) ((void)0)
#endif

/* What goes to storage and comes from there: alone in its cache lines, as all in the arena is. */
static union {
    pm_record_t record;
    unsigned char lines[(PM_RECORD_BYTES + PM_ALIGNMENT - 1u) / PM_ALIGNMENT * PM_ALIGNMENT];
} pm_moving __attribute__((aligned(PM_ALIGNMENT)));

static uint32_t pm_record_slot(uint32_t generation)
{
    return PM_PAGE_SLOTS + (generation + 1u) * PM_STATE_SLOTS - 1u;
}

/* What the records say together. */
typedef struct {
    pm_record_t newest; /* of the whole ones below a number; its number is 0 where there is none */
    uint32_t generation;
    uint32_t last;  /* the highest number of all, 0 without any; a damaged record still has its mark */
    int is_new_run; /* that one is damaged, and the first of its run */
    int is_damaged; /* the driver says so of one */
} pm_records_t;

/* Reads all records. A short read is none where pm_init asks: a file may be shorter than what it is to become. */
static int pm_read_records(uint32_t below, int is_short_none, pm_records_t *found)
{
    const pm_record_t *const record = &pm_moving.record;
    memset(found, 0, sizeof *found);
    found->generation = PM_GENERATIONS - 1u;
    for (uint32_t generation = 0; generation < PM_GENERATIONS; generation++) {
        const uint32_t slot = pm_record_slot(generation);
        int error = pm_page_in(slot, &pm_moving, PM_RECORD_BYTES);
        if (!error) error = pm_page_wait(slot);
        if (error == PM_ERROR_CHECKSUM) found->is_damaged = 1;
        if (error == PM_ERROR_CHECKSUM || (error == PM_ERROR_SHORT && is_short_none)) continue;
        if (error) return pm_page_error(error);

        const int is_sound = record->checksum == pm_checksum(0, record, (uint32_t)offsetof(pm_record_t, checksum));
        const int is_step = record->step_id == PM_STEP_ID, is_layout = record->layout_id == PM_LAYOUT_ID;
        const uint32_t marked = record->mark ^ PM_MARK;
        if (is_sound && is_step && is_layout) {
            if (record->number > found->last) {
                found->last = record->number;
                found->is_new_run = 0;
            }
            if (record->number < below && record->number > found->newest.number) {
                found->newest = *record;
                found->generation = generation;
            }
        } else if (!is_sound && (is_step || is_layout) && marked < PM_MOST_COMMITS && marked > found->last) {
            found->last = marked;
            found->is_new_run = record->run == marked && record->commits == 1u;
        }
    }
    return PM_OK;
}

/* Takes what a record says as what holds now; none: what holds before the first commit of a run. */
static void pm_take(const pm_record_t *record, uint32_t generation, uint32_t last)
{
    pm_generation = generation;
    pm_numbers[0] = record->number;
    pm_numbers[1] = last + 1u;
    pm_run = record->run;
    pm_commits = record->commits;
    pm_steps = record->steps;
    PM_RANDOM_FROM(pm_steps);
}

int pm_commit_clear(void)
{
    pm_records_t found;
    PM_TRY(pm_read_records(0xFFFFFFFFu, 1, &found));
    const pm_record_t none = {0, 0, 0, found.last + 1u, 0, 0, 0, 0};
    pm_take(&none, found.generation, found.last);
    return PM_OK;
}

int pm_commit(uint32_t steps)
{
    const uint32_t generation = (pm_generation + 1u) % PM_GENERATIONS, slot = pm_record_slot(generation);
    const uint32_t commits = pm_commits + (steps || !pm_commits ? 1u : 0u);
    const pm_record_t record = {PM_STEP_ID, PM_LAYOUT_ID, pm_numbers[1], pm_run, commits, pm_steps + steps, 0, 0};
    pm_moving.record = record;
    pm_moving.record.checksum = pm_checksum(0, &record, (uint32_t)offsetof(pm_record_t, checksum));
    pm_moving.record.mark = record.number ^ PM_MARK;
    PM_TRY_PAGE(pm_page_out(slot, &pm_moving, PM_RECORD_BYTES));
    PM_TRY_PAGE(pm_page_wait(slot));
    pm_take(&record, generation, record.number);
    return PM_OK;
}

int pm_resume(void)
{
    pm_records_t found;
    uint32_t below = 0xFFFFFFFFu, last = 0, run = 0;
    pm_commits = 0;
    for (;;) {
        PM_TRY(pm_read_records(below, 0, &found));
        if (below == 0xFFFFFFFFu) {
            last = found.last;
            run = found.newest.run;
        }
        if (found.newest.number == 0 || found.newest.run != run || found.is_new_run) {
            return last || found.is_damaged ? PM_ERROR_CHECKSUM : PM_ERROR_EMPTY;
        }
        pm_take(&found.newest, found.generation, last);
        const int error = pm_load_state();
        if (error != PM_ERROR_CHECKSUM) return error ? error : pm_numbers[0] == last ? PM_OK : PM_RESUMED_OLDER;
        below = found.newest.number;
    }
}

#else
typedef int pm_commit_is_not_used;
#endif
