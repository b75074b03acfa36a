/* Commits: of two generations of the state on storage one is whole, whenever the power goes. A record says which: it
   is written when the new generation is, to the place of the older of two records, and counts once its checksum is
   right. */
#include <stddef.h>

#include "pm_checksum.h"
#include "pm_runtime.h"

#if PM_COMMIT

typedef struct {
    uint32_t step_id; /* of another step: not ours */
    uint32_t number;  /* of the commit; 0: none */
    uint32_t generation;
    uint32_t checksum; /* of the three */
} pm_record_t;

uint32_t pm_generation;
uint32_t pm_commits; /* the number of the last one: pm_init makes the first, each step another */

#if PM_RANDOM
extern uint32_t pm_random_step; /* see kernels/pm_random.h: the steps that were committed, so that no record has it */
#define PM_RANDOM_FROM(step) (pm_random_step = (step))
#else
#define PM_RANDOM_FROM(step) ((void)0)
#endif

/* What goes to storage and comes from there: alone in its cache lines, as all in the arena is. */
static union {
    pm_record_t record;
    unsigned char lines[PM_ALIGNMENT];
} pm_moved __attribute__((aligned(PM_ALIGNMENT)));

static int pm_write_record(uint32_t place, const pm_record_t *record)
{
    const uint32_t slot = (uint32_t)PM_SLOTS + place;
    pm_moved.record = *record;
    PM_TRY(pm_page_out(slot, &pm_moved, sizeof *record));
    return pm_page_wait(slot);
}

static int pm_read_record(uint32_t place, pm_record_t *record)
{
    const uint32_t slot = (uint32_t)PM_SLOTS + place;
    PM_TRY(pm_page_in(slot, &pm_moved, sizeof *record));
    PM_TRY(pm_page_wait(slot));
    *record = pm_moved.record;
    const int ours = record->step_id == PM_STEP_ID && record->number > 0 && record->generation <= 1u;
    const uint32_t sum = pm_checksum(0, record, (uint32_t)offsetof(pm_record_t, checksum));
    return ours && record->checksum == sum ? PM_OK : PM_ERROR_EMPTY;
}

int pm_commit_clear(void)
{
    static const pm_record_t none = {0, 0, 0, 0};
    pm_generation = 0;
    pm_commits = 0;
    PM_RANDOM_FROM(0);
    PM_TRY(pm_write_record(0, &none));
    return pm_write_record(1, &none);
}

int pm_commit(void)
{
    pm_record_t record = {PM_STEP_ID, pm_commits + 1u, 1u - pm_generation, 0};
    record.checksum = pm_checksum(0, &record, (uint32_t)offsetof(pm_record_t, checksum));
    PM_TRY(pm_write_record(record.number & 1u, &record));
    pm_commits = record.number;
    pm_generation = record.generation;
    return PM_OK;
}

int pm_resume(void)
{
    pm_record_t record;
    pm_commits = 0;
    for (uint32_t place = 0; place < 2u; place++) {
        const int error = pm_read_record(place, &record);
        if (error == PM_OK && record.number > pm_commits) {
            pm_commits = record.number;
            pm_generation = record.generation;
        }
        if (error == PM_ERROR_PAGE) return error; /* all others: this record was not written, or not to its end */
    }
    PM_RANDOM_FROM(pm_commits ? pm_commits - 1u : 0u);
    return pm_commits ? pm_load_resident() : PM_ERROR_EMPTY;
}

#else
typedef int pm_commit_is_not_used;
#endif
