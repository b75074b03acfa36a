/* The page driver over storage that is a row of bytes: where slots lie, checks, checksums. It is code: the one file of
   a driver that has the functions of pm_storage.h includes it. Every transfer is done when the call returns; a port
   with DMA writes the functions of pages itself. */
#ifndef PM_PAGES_H
#define PM_PAGES_H

#include "pm.h"
#include "pm_storage.h"

#ifdef PM_CHECKSUM
#include "../src/pm_checksum.h"
#endif

#ifdef PM_FAULTS /* storage that goes wrong on purpose is put between */
#include "../host/pm_faults.h"
#define PM_STORAGE_READ pm_faulty_read
#define PM_STORAGE_WRITE pm_faulty_write
#else
#define PM_STORAGE_READ pm_storage_read
#define PM_STORAGE_WRITE pm_storage_write
#endif

#if defined(PM_CHECKSUM) && PM_MAPPED
#error "pages that are written piece by piece carry no checksum: leave CHECKSUM out"
#endif

/* After the slots of the step come the two records of commits. */
#define PM_PAGES ((uint32_t)PM_SLOTS + 2u * PM_COMMIT)
#define PM_RECORD_BYTES 16u

#ifdef PM_CHECKSUM
#define PM_SUM_BYTES (4u + PM_STORAGE_UNIT - 1u)
static uint32_t pm_sum[PM_PAGES + 1u]; /* of what was written last since the start, 0 where nothing was */
#else
#define PM_SUM_BYTES 0u
#endif

/* A number that may be 0 without a warning where something is compared with it. */
static inline uint32_t pm_count(uint32_t number)
{
    return number;
}

static uint32_t pm_bytes_of(uint32_t slot)
{
    return slot < pm_count(PM_SLOTS) ? pm_slot_bytes[slot] * (uint32_t)(sizeof(pm_real) / 4u) : PM_RECORD_BYTES;
}

/* Finds where bytes of a slot are. */
static int pm_find(uint32_t slot, uint32_t offset, uint32_t bytes, uint32_t *address)
{
    if (slot >= pm_count(PM_PAGES) || offset > pm_bytes_of(slot) || bytes > pm_bytes_of(slot) - offset) {
        return PM_ERROR_SLOT;
    }
    uint32_t start = 0;
    for (uint32_t k = 0; k < slot; k++) {
        const uint32_t room = pm_bytes_of(k) + PM_SUM_BYTES + PM_STORAGE_BLOCK - 1u;
        start += room - room % PM_STORAGE_BLOCK;
    }
    *address = start + offset;
    return PM_OK;
}

#ifdef PM_CHECKSUM
/* Where the sum of a page is: after it, where a write may begin. */
static uint32_t pm_sum_place(uint32_t address, uint32_t bytes)
{
    const uint32_t end = address + bytes + PM_STORAGE_UNIT - 1u;
    return end - end % PM_STORAGE_UNIT;
}

/* Of a page and its slot, so that a page of another slot does not pass; never 0. */
static uint32_t pm_sum_of(uint32_t slot, const void *data, uint32_t bytes)
{
    const uint32_t sum = pm_checksum(pm_checksum(0, &slot, sizeof slot), data, bytes);
    return sum ? sum : 1u;
}
#endif

int pm_page_out(uint32_t slot, const void *from, uint32_t bytes)
{
    uint32_t address;
    const int error = pm_find(slot, 0, bytes, &address);
    if (error) return error;
#ifdef PM_CHECKSUM
    if (bytes != pm_bytes_of(slot)) return PM_ERROR_SLOT; /* the sum is of the whole page */
    const uint32_t sum = pm_sum_of(slot, from, bytes);
    pm_sum[slot] = sum;
    const int written = PM_STORAGE_WRITE(address, from, bytes);
    return written ? written : PM_STORAGE_WRITE(pm_sum_place(address, bytes), &sum, sizeof sum);
#else
    return PM_STORAGE_WRITE(address, from, bytes);
#endif
}

int pm_page_in(uint32_t slot, void *to, uint32_t bytes)
{
    uint32_t address;
    const int error = pm_find(slot, 0, bytes, &address);
    if (error) return error;
#ifdef PM_CHECKSUM
    uint32_t sum = 0;
    if (bytes != pm_bytes_of(slot)) return PM_ERROR_SLOT;
    int moved = PM_STORAGE_READ(address, to, bytes);
    if (!moved) moved = PM_STORAGE_READ(pm_sum_place(address, bytes), &sum, sizeof sum);
    if (moved) return moved;
    const int is_last = pm_sum[slot] == 0 || pm_sum[slot] == sum; /* an older page has its own sum */
    return is_last && pm_sum_of(slot, to, bytes) == sum ? PM_OK : PM_ERROR_CHECKSUM;
#else
    return PM_STORAGE_READ(address, to, bytes);
#endif
}

int pm_page_wait(uint32_t slot)
{
    return slot >= pm_count(PM_PAGES) ? PM_ERROR_SLOT : PM_OK;
}

#if PM_MAPPED
const void *pm_page_address(uint32_t slot)
{
    uint32_t address = 0;
    (void)pm_find(slot, 0, 0, &address);
    return pm_storage_address(address);
}

int pm_page_write(uint32_t slot, uint32_t offset, const void *from, uint32_t bytes)
{
    uint32_t address;
    const int error = pm_find(slot, offset, bytes, &address);
    return error ? error : PM_STORAGE_WRITE(address, from, bytes);
}
#endif

#endif
