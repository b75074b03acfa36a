/* Groups of stored samples on storage: header and seal. Each begins an erase block. */
#ifndef PM_GROUPS_H
#define PM_GROUPS_H

#include "pm_checksum.h"

/* The header of a group. It has one run and its place or, while pm_migrate takes samples over, two: then the group is
   one of the old state and one of the new state. */
typedef struct {
    uint32_t sample_id; /* identity and form of the samples */
    uint32_t runs[2];   /* runs of the states to which the samples belong (pm_generation.h); the second may be 0 */
    uint32_t number;    /* counts written groups of a run */
    uint32_t seen;      /* pm_seen after the group is written */
    uint16_t samples;   /* pm_samples() after it */
    uint16_t group;
    uint16_t places[2]; /* of the group, as the programs of both states count them */
    uint32_t checksum;
} pm_group_t;

#define PM_GROUP_HEADER_BYTES 32u
#define PM_GROUP_SEAL_BYTES 8u

static inline uint32_t pm_group_sum(const pm_group_t *header)
{
    return pm_checksum(0x504D5333u, header, (uint32_t)(sizeof *header - sizeof header->checksum));
}

/* Returns which of the runs of an intact header is `run`; otherwise -1. */
static inline int pm_group_is_of(const pm_group_t *header, uint32_t run)
{
    const int which = header->runs[0] == run ? 0 : header->runs[1] == run ? 1 : -1;
    return which >= 0 && header->checksum == pm_group_sum(header) ? which : -1;
}

/* Returns the offset of the seal in a group: samples of `bytes` bytes, written in chunks. */
static inline uint32_t pm_group_seal_offset(uint32_t samples, uint32_t bytes, uint32_t chunk)
{
    return (PM_GROUP_HEADER_BYTES + samples * bytes + chunk - 1u) / chunk * chunk;
}

static inline void pm_group_seal(const pm_group_t *header, uint32_t seal[2])
{
    seal[0] = header->number ^ 0x6B2FD149u;
    seal[1] = ~seal[0] ^ header->checksum;
}

#endif
