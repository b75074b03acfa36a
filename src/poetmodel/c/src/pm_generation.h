/* A generation of committed state on storage: a record, tensors with their checksums, a seal. The step that writes it
   (pm_commit.c), its driver (port/pm_pages.h) and a later step that reads it (pm_migrate.c) share this. */
#ifndef PM_GENERATION_H
#define PM_GENERATION_H

#include "pm.h"
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

/* Number of generations that share an erase block, from that of the build for float; 1: each begins a block. */
#define PM_SHARED_HERE(generations) ((generations) > 1u ? (generations) / (uint32_t)(sizeof(pm_real) / 4u) : 1u)
#define PM_SHARED PM_SHARED_HERE(PM_BLOCK_GENERATIONS)

/* Constants of the mark of a seal; the first generation after pm_init has a different one. Numbers are below
   PM_MOST_COMMITS, so that the two marks, all zeros and all ones can be distinguished. */
#define PM_MARK 0xA5C31E87u
#define PM_FIRST_MARK 0x53C31E87u
#define PM_MOST_COMMITS 0x10000000u

/* The last 12 bits of a layout are the number of generations that take turns, minus 1. */
#define PM_COUNT_BITS 0xFFFu

/* Returns the checksum of a record of any program. In memory of only zero bits, or only one bits, it is not valid. */
static inline uint32_t pm_record_sum(const pm_record_t *record)
{
    return pm_checksum(0x504D5231u, record, (uint32_t)(sizeof *record - sizeof record->checksum));
}

/* Returns a layout without its number of generations: a hash of the order of state and of the storage parameters of a
   build. With another one, tensors are at other addresses. `kind` is 1 for the best state, otherwise 0. */
static inline uint32_t pm_layout_hash(uint32_t layout_id, uint32_t unit, uint32_t block, uint32_t has_sums,
                                      uint32_t shared, uint32_t kind)
{
    const uint32_t parts[] = {layout_id, unit, block, has_sums, (uint32_t)sizeof(pm_real), shared, kind};
    return pm_checksum(0, parts, sizeof parts) & ~PM_COUNT_BITS;
}

/* Returns the seal of a generation; `layout` is without its number of generations. */
static inline pm_seal_t pm_seal_of(const pm_record_t *record, uint32_t instance_id, uint32_t step_id, uint32_t layout)
{
    const uint32_t mark = record->number ^ (record->number == record->run ? PM_FIRST_MARK : PM_MARK);
    const uint32_t parts[] = {instance_id, step_id, layout};
    const pm_seal_t seal = {mark, ~mark ^ pm_checksum(0, parts, sizeof parts)};
    return seal;
}

static inline uint32_t pm_up(uint32_t bytes, uint32_t step)
{
    return (bytes + step - 1u) / step * step;
}

/* Returns the offset of a slot in a generation [bytes]: 0 is the record, then the tensors, then the seal; for the number
   of slots, the end. `bytes` has the sizes of the tensors in the build for float, `unit` is their alignment. */
static inline uint32_t pm_slot_offset(uint32_t slot, const uint32_t *bytes, uint32_t tensors, uint32_t unit, int has_sums)
{
    const uint32_t sum = has_sums ? pm_up(4u, unit) : 0u, scale = (uint32_t)(sizeof(pm_real) / 4u);
    uint32_t offset = slot ? pm_up(PM_RECORD_BYTES, unit) : 0u;
    for (uint32_t k = 1; k < slot && k <= tensors; k++) offset += pm_up(bytes[k - 1u] * scale, unit) + sum;
    return slot > tensors + 1u ? offset + pm_up(PM_SEAL_BYTES, unit) : offset;
}

#endif
