/* The record and the seal: first and last slot of a generation of committed state. */
#ifndef PM_RECORD_H
#define PM_RECORD_H

#include "pm_checksum.h"

/* PM_RECORD_BYTES. A step writes the record first, at the beginning of the generation. The first generation of an erase
   block begins the block, where every program can find its record. */
typedef struct {
    uint32_t instance_id; /* PM_INSTANCE_ID; records of other instances, steps or layouts are ignored */
    uint32_t step_id;
    uint32_t layout_id;
    uint32_t number;  /* number of the generation, from 1 on; pm_init does not reset it */
    uint32_t run;     /* number of the first generation since its pm_init */
    uint32_t commits; /* pm_commits; in the best generation, the loss as a float */
    uint32_t steps;   /* pm_steps */
    uint32_t checksum;
} pm_record_t;

/* PM_SEAL_BYTES. A step writes the seal last, in a single write to a separate write unit. A power cut during an
   earlier write leaves no seal; a power cut during this write leaves all other data intact. */
typedef struct {
    uint32_t mark;  /* from the number of the generation */
    uint32_t check; /* from mark and identity, so that the seal is valid without its record */
} pm_seal_t;

/* Number of generations that share an erase block; 1: each begins a block. */
#define PM_SHARED (PM_BLOCK_GENERATIONS > 1u ? PM_BLOCK_GENERATIONS / (uint32_t)(sizeof(pm_real) / 4u) : 1u)

/* Returns the checksum of a record of any program. In memory of only zero bits, or only one bits, it is not valid. */
static inline uint32_t pm_record_sum(const pm_record_t *record)
{
    return pm_checksum(0x504D5231u, record, (uint32_t)(sizeof *record - sizeof record->checksum));
}

#endif
