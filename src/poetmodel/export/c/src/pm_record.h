/* What a generation of committed state begins and ends with. */
#ifndef PM_RECORD_H
#define PM_RECORD_H

#include "pm_checksum.h"

/* PM_RECORD_BYTES. A step writes it first, at the start of an erase block, where every program finds it. */
typedef struct {
    uint32_t instance_id; /* PM_INSTANCE_ID; of another one, or of another step or layout: not ours */
    uint32_t step_id;
    uint32_t layout_id;
    uint32_t number;  /* counts the generations that were begun, from 1 on, over each pm_init too */
    uint32_t run;     /* the first number of its pm_init */
    uint32_t commits; /* pm_commits */
    uint32_t steps;   /* pm_steps */
    uint32_t checksum;
} pm_record_t;

/* PM_SEAL_BYTES. A step writes it last, by a write of its own to a write unit of its own: a power cut while something
   else is written leaves no seal, and one while the seal is written leaves all of the rest. */
typedef struct {
    uint32_t mark;  /* of the number */
    uint32_t check; /* of the mark and the identity, so that it counts beside a damaged record */
} pm_seal_t;

/* How many generations share an erase block, one behind the other; 1: each begins a block. */
#define PM_SHARED (PM_BLOCK_GENERATIONS > 1u ? PM_BLOCK_GENERATIONS / (uint32_t)(sizeof(pm_real) / 4u) : 1u)

/* The checksum of a record of any program: memory that is all zeros or all ones is none. */
static inline uint32_t pm_record_sum(const pm_record_t *record)
{
    return pm_checksum(0x504D5231u, record, (uint32_t)(sizeof *record - sizeof record->checksum));
}

#endif
