/* The page driver for byte-addressed storage: offsets of slots, checks, checksums. It is code: the source file of a
   driver with the functions of pm_storage.h includes it. All transfers are done when the call returns; a port with
   DMA implements the functions of pages itself. If storage is volatile (PM_VOLATILE), there are two drivers: that of
   storage, and that of the flash with generations, which defines PM_FLASH_DRIVER first and has all generations. */
#ifndef PM_PAGES_H
#define PM_PAGES_H

#include "pm.h"
#include "pm_storage.h"

#if PM_VOLATILE && defined(PM_FLASH_DRIVER)

#define pm_storage_read pm_flash_read
#define pm_storage_write pm_flash_write
#undef PM_MAPPED
#undef PM_STORAGE_UNIT
#undef PM_STORAGE_BLOCK
#undef PM_STORED_BYTES
#define PM_MAPPED 0
#define PM_STORAGE_UNIT PM_COMMIT_UNIT
#define PM_STORAGE_BLOCK PM_COMMIT_BLOCK
#define PM_STORED_BYTES (PM_COMMITTED_BYTES + PM_REPLAY_BYTES)

/* Returns the size of the flash with generations [bytes]. */
static inline uint32_t pm_end(void)
{
    return PM_STORED_BYTES;
}

#else

#include "../src/pm_generation.h"

#ifdef PM_FAULTS /* fault injection in front of storage */
#include "../host/pm_faults.h"
#define PM_READ(read, address, to, bytes) pm_faulty_read(read, address, to, bytes)
#define PM_WRITE(write, address, from, bytes) pm_faulty_write(write, address, from, bytes)
#else
#define PM_READ(read, address, to, bytes) read(address, to, bytes)
#define PM_WRITE(write, address, from, bytes) write(address, from, bytes)
#endif

#if defined(PM_CHECKSUM) && PM_MAPPED && (!PM_COMMIT || PM_VOLATILE)
#error "pages that are written piece by piece carry no checksum: leave CHECKSUM out"
#endif

/* Returns the error of a transfer; unknown errors of storage become PM_ERROR_PAGE. */
static int pm_moved(int error)
{
    return error == PM_OK || error == PM_ERROR_SHORT ? error : PM_ERROR_PAGE;
}

/* Returns a constant that may be 0, without warnings about comparisons with it. */
static inline uint32_t pm_count(uint32_t number)
{
    return number;
}

/* Transfer bytes of a slot at an address of storage, or of the flash with generations; return PM_OK or an error. */
static int pm_read(uint32_t slot, uint32_t address, void *to, uint32_t bytes)
{
#if PM_VOLATILE
    if (slot >= pm_count(PM_PAGE_SLOTS)) return pm_moved(PM_READ(pm_flash_read, address, to, bytes));
#endif
    (void)slot;
    return pm_moved(PM_READ(pm_storage_read, address, to, bytes));
}

static int pm_write(uint32_t slot, uint32_t address, const void *from, uint32_t bytes)
{
#if PM_VOLATILE
    if (slot >= pm_count(PM_PAGE_SLOTS)) return pm_moved(PM_WRITE(pm_flash_write, address, from, bytes));
#endif
    (void)slot;
    return pm_moved(PM_WRITE(pm_storage_write, address, from, bytes));
}

#ifdef PM_CHECKSUM
#ifdef PM_CHIP_UNIT
#define PM_PAGE_UNIT 32u
#else
#define PM_PAGE_UNIT PM_STORAGE_UNIT
#endif
#define PM_PAGE_SUM_BYTES (4u + PM_PAGE_UNIT - 1u)
static uint32_t pm_sum[PM_PAGE_SLOTS + 1u]; /* checksum of the last write since the start, 0 if none */
#else
#define PM_PAGE_SUM_BYTES 0u
#endif

/* Returns the slot number within its generation, from PM_PAGE_SLOTS on; slots of pages are unchanged. */
static uint32_t pm_row_of(uint32_t slot)
{
#if PM_COMMIT
    if (slot >= pm_count(PM_PAGE_SLOTS) && slot < PM_SLOTS) {
        return PM_PAGE_SLOTS + (slot - PM_PAGE_SLOTS) % PM_STATE_SLOTS;
    }
#endif
    return slot;
}

#if PM_COMMIT
#define PM_RECORD_ROW PM_PAGE_SLOTS
#define PM_SEAL_ROW (PM_PAGE_SLOTS + PM_STATE_SLOTS - 1u)
#endif

#if PM_REPLAY
/* Size of a group of samples, which pm_replay.c writes. */
static uint32_t pm_group_bytes(void)
{
    const uint32_t samples = PM_GROUP_SAMPLES * PM_SAMPLE_BYTES * (uint32_t)(sizeof(pm_real) / 4u);
    return pm_up(32u + samples, PM_CHUNK) + PM_CHUNK;
}
#endif

static uint32_t pm_bytes_of(uint32_t slot)
{
    const uint32_t row = pm_row_of(slot);
#if PM_COMMIT
    if (row == PM_RECORD_ROW) return PM_RECORD_BYTES;
    if (row == PM_SEAL_ROW) return PM_SEAL_BYTES;
#endif
#if PM_REPLAY
    if (slot >= pm_count(PM_SLOTS)) return pm_group_bytes();
#endif
    return pm_slot_bytes[row] * (uint32_t)(sizeof(pm_real) / 4u);
}

#if PM_COMMIT
/* Alignment of every tensor and checksum of a generation: PM_CHIP_UNIT is the unit that a driver detects. */
static uint32_t pm_unit(void)
{
    const uint32_t least = (uint32_t)sizeof(pm_real) > PM_COMMIT_UNIT ? (uint32_t)sizeof(pm_real) : PM_COMMIT_UNIT;
#ifdef PM_CHIP_UNIT
    const uint32_t found = PM_CHIP_UNIT;
    return found > least ? found : least;
#else
    return least;
#endif
}

#if PM_STATE_SUMS
/* Returns whether a slot is a tensor of a generation with a checksum after it. */
static int pm_has_sum(uint32_t slot)
{
    const uint32_t row = pm_row_of(slot);
    return slot < PM_SLOTS && row > PM_RECORD_ROW && row < PM_SEAL_ROW;
}
#endif

/* Returns the size of the slots of a generation before one of them. */
static uint32_t pm_rows_before(uint32_t end)
{
    const uint32_t *const bytes = pm_slot_bytes + PM_RECORD_ROW + 1u;
    return pm_slot_offset(end - PM_RECORD_ROW, bytes, PM_STATE_SLOTS - 2u, pm_unit(), PM_STATE_SUMS);
}

/* Returns the address of a generation; for the number of generations, the end of the last one. */
static uint32_t pm_generation_start(uint32_t generation)
{
    if (PM_SHARED > 1u) {
        const uint32_t apart = PM_COMMIT_BLOCK / PM_SHARED / PM_PITCH_STEP * PM_PITCH_STEP;
        if (generation >= PM_GENERATIONS) generation = pm_up(generation, PM_SHARED);
        return generation / PM_SHARED * PM_COMMIT_BLOCK + generation % PM_SHARED * apart;
    }
    return generation * pm_up(pm_rows_before(PM_SEAL_ROW + 1u), PM_COMMIT_BLOCK);
}
#endif

/* Returns the address of a slot; for the number of slots, the end of storage. Generations are first, then pages, so
   that programs with other tensors find each other's records; stored samples are last. */
static uint32_t pm_start_of(uint32_t slot)
{
    uint32_t start = 0;
#if PM_REPLAY && PM_VOLATILE
    if (slot >= pm_count(PM_SLOTS)) {
        return pm_generation_start(PM_PLACES) + (slot - PM_SLOTS) * pm_up(pm_group_bytes(), PM_COMMIT_BLOCK);
    }
#endif
#if PM_COMMIT
    if (slot >= pm_count(PM_PAGE_SLOTS) && slot < PM_SLOTS) {
        return pm_generation_start((slot - PM_PAGE_SLOTS) / PM_STATE_SLOTS) + pm_rows_before(pm_row_of(slot));
    }
    if (!PM_VOLATILE) start = pm_generation_start(PM_PLACES);
#endif
    for (uint32_t k = 0; k < slot && k < pm_count(PM_PAGE_SLOTS); k++) {
        start += pm_up(pm_bytes_of(k) + PM_PAGE_SUM_BYTES, PM_STORAGE_BLOCK);
    }
#if PM_REPLAY && !PM_VOLATILE
    if (slot > PM_SLOTS) start += (slot - PM_SLOTS) * pm_up(pm_group_bytes(), PM_STORAGE_BLOCK);
#endif
    return start;
}

/* Returns the end of storage [bytes]. */
static inline uint32_t pm_end(void)
{
    return PM_VOLATILE ? pm_start_of(PM_PAGE_SLOTS) : pm_start_of(PM_SLOTS + PM_GROUPS);
}

/* Computes the address of bytes at an offset in a slot. Returns PM_ERROR_SLOT if the slot does not have these bytes. */
static int pm_find(uint32_t slot, uint32_t offset, uint32_t bytes, uint32_t *address)
{
    static uint32_t last, start; /* last slot plus 1, and its address: slots are often accessed in pieces */
    *address = start + offset;
    if (slot >= pm_count(PM_SLOTS + PM_GROUPS) || offset > pm_bytes_of(slot) || bytes > pm_bytes_of(slot) - offset) {
        return PM_ERROR_SLOT;
    }
    if (slot + 1u != last) start = pm_start_of(slot);
    last = slot + 1u;
    *address = start + offset;
    return PM_OK;
}

#if PM_STATE_SUMS
#ifdef __cplusplus
extern "C" {
#endif
extern uint32_t pm_numbers[2]; /* numbers of the generation to read and of the generation to write: pm_commit.c */
#ifdef __cplusplus
}
#endif

/* Returns the start value of the checksum of a tensor, from the layout, its slot, and the number of the generation to
   read, or to write (`written`): data of another tensor, generation or layout has another checksum. */
static uint32_t pm_sum_begin(uint32_t slot, int written)
{
    const uint32_t key[3] = {PM_LAYOUT_ID, pm_row_of(slot), pm_numbers[written]};
    return pm_sum_on(0, key, sizeof key);
}

/* Compares the checksum stored after a tensor with that of the bytes read. */
static int pm_sum_compare(uint32_t slot, uint32_t address, uint32_t found)
{
    uint32_t sum = 0;
    const int error = pm_read(slot, address + pm_up(pm_bytes_of(slot), pm_unit()), &sum, sizeof sum);
    return error ? error : sum == found ? PM_OK : PM_ERROR_CHECKSUM;
}

static int pm_sum_write(uint32_t slot, uint32_t address, uint32_t sum)
{
    return pm_write(slot, address + pm_up(pm_bytes_of(slot), pm_unit()), &sum, sizeof sum);
}
#endif

#if PM_COMMIT
/* Returns the end of the storage that may have a generation of another program: also one that pm_migrate has moved. */
static uint32_t pm_search_end(void)
{
#if PM_MIGRATES
    return pm_old_end();
#else
    return pm_end();
#endif
}

/* If a generation begins without a record, searches its other blocks and, for the last generation, all blocks after it:
   another program may have begun its generations there. Copies a found record to *record, with the number 0. */
static int pm_find_record(uint32_t slot, uint32_t address, pm_record_t *record)
{
    const uint32_t generation = (slot - PM_PAGE_SLOTS) / PM_STATE_SLOTS;
    const uint32_t next = generation + PM_SHARED < PM_GENERATIONS ? generation + PM_SHARED : PM_GENERATIONS;
    const uint32_t is_last = next == PM_GENERATIONS && !PM_VOLATILE;
    const uint32_t end = is_last ? pm_search_end() : pm_generation_start(next);
    if (generation % PM_SHARED || generation >= PM_GENERATIONS || record->checksum == pm_record_sum(record)) return PM_OK;
    for (uint32_t at = address + PM_COMMIT_BLOCK; at + PM_RECORD_BYTES <= end; at += PM_COMMIT_BLOCK) {
        pm_record_t found;
        const int error = pm_read(slot, at, &found, PM_RECORD_BYTES);
        if (error) return error == PM_ERROR_SHORT ? PM_OK : error;
        if (found.checksum == pm_record_sum(&found)) {
            found.number = 0;
            found.checksum = pm_record_sum(&found);
            *record = found;
            return PM_OK;
        }
    }
    return PM_OK;
}
#endif

#ifdef PM_CHECKSUM
/* Returns the address of the checksum of a page: after it, at a write unit. */
static uint32_t pm_sum_place(uint32_t address, uint32_t bytes)
{
    return pm_up(address + bytes, PM_PAGE_UNIT);
}

/* Returns the checksum of a page and its slot number, so that pages of other slots are detected; never 0. */
static uint32_t pm_sum_of(uint32_t slot, const void *data, uint32_t bytes)
{
    const uint32_t sum = pm_checksum(pm_checksum(0, &slot, sizeof slot), data, bytes);
    return sum ? sum : 1u;
}
#endif

int pm_page_out(uint32_t slot, const void *from, uint32_t bytes)
{
    uint32_t address;
    int error = pm_find(slot, 0, bytes, &address);
    if (!error) error = pm_write(slot, address, from, bytes);
#if PM_STATE_SUMS
    if (!error && pm_has_sum(slot)) {
        if (bytes != pm_bytes_of(slot)) return PM_ERROR_SLOT; /* the checksum is of the whole tensor */
        return pm_sum_write(slot, address, pm_sum_on(pm_sum_begin(slot, 1), from, bytes));
    }
#endif
#ifdef PM_CHECKSUM
    if (!error && slot < pm_count(PM_PAGE_SLOTS)) {
        if (bytes != pm_bytes_of(slot)) return PM_ERROR_SLOT;
        const uint32_t sum = pm_sum_of(slot, from, bytes);
        pm_sum[slot] = sum;
        return pm_write(slot, pm_sum_place(address, bytes), &sum, sizeof sum);
    }
#endif
    return error;
}

int pm_page_in(uint32_t slot, void *to, uint32_t bytes)
{
    uint32_t address;
    int error = pm_find(slot, 0, bytes, &address);
    if (!error) error = pm_read(slot, address, to, bytes);
#if PM_COMMIT
    if (!error && pm_row_of(slot) == PM_RECORD_ROW) {
        return bytes == PM_RECORD_BYTES ? pm_find_record(slot, address, (pm_record_t *)to) : PM_ERROR_SLOT;
    }
#endif
#if PM_STATE_SUMS
    if (!error && pm_has_sum(slot)) {
        if (bytes != pm_bytes_of(slot)) return PM_ERROR_SLOT;
        return pm_sum_compare(slot, address, pm_sum_on(pm_sum_begin(slot, 0), to, bytes));
    }
#endif
#ifdef PM_CHECKSUM
    if (!error && slot < pm_count(PM_PAGE_SLOTS)) {
        uint32_t sum = 0;
        if (bytes != pm_bytes_of(slot)) return PM_ERROR_SLOT;
        error = pm_read(slot, pm_sum_place(address, bytes), &sum, sizeof sum);
        if (error) return error;
        const int is_last = pm_sum[slot] == 0 || pm_sum[slot] == sum; /* an older page has another checksum */
        return is_last && pm_sum_of(slot, to, bytes) == sum ? PM_OK : PM_ERROR_CHECKSUM;
    }
#endif
    return error;
}

int pm_page_wait(uint32_t slot)
{
    return slot >= pm_count(PM_SLOTS) ? PM_ERROR_SLOT : PM_OK;
}

#if PM_MIGRATES
int pm_old_read(uint32_t address, void *to, uint32_t bytes)
{
    return pm_read(PM_PAGE_SLOTS, address, to, bytes);
}

int pm_old_write(uint32_t address, const void *from, uint32_t bytes)
{
    return pm_write(PM_PAGE_SLOTS, address, from, bytes);
}

void pm_old_place(uint32_t place, uint32_t *begin, uint32_t *end)
{
#if PM_REPLAY
    if (place >= PM_PLACES) {
        *begin = pm_start_of(PM_SLOTS + place - PM_PLACES);
        *end = *begin + pm_up(pm_group_bytes(), PM_COMMIT_BLOCK);
        return;
    }
#endif
    *begin = pm_generation_start(place);
    *end = *begin + pm_up(pm_rows_before(PM_SEAL_ROW + 1u), PM_COMMIT_BLOCK);
}

uint32_t pm_old_unit(void)
{
#ifdef PM_CHIP_UNIT
    const uint32_t found = PM_CHIP_UNIT;
    return found > PM_OLD_COMMIT_UNIT ? found : PM_OLD_COMMIT_UNIT;
#else
    return PM_OLD_COMMIT_UNIT;
#endif
}

uint32_t pm_old_end(void)
{
    return PM_STORED_BYTES * (uint32_t)(sizeof(pm_real) / 4u);
}
#endif

#if PM_REPLAY
int pm_page_read(uint32_t slot, uint32_t offset, void *to, uint32_t bytes)
{
    uint32_t address;
    const int error = pm_find(slot, offset, bytes, &address);
    return error ? error : pm_read(slot, address, to, bytes);
}
#endif

#if PM_MAPPED
const void *pm_page_address(uint32_t slot)
{
    uint32_t address;
    return pm_find(slot, 0, 0, &address) ? 0 : pm_storage_address(address);
}
#endif

#if PM_MAPPED || PM_REPLAY
int pm_page_write(uint32_t slot, uint32_t offset, const void *from, uint32_t bytes)
{
    uint32_t address;
    int error = pm_find(slot, offset, bytes, &address);
    if (!error) error = pm_write(slot, address, from, bytes);
#if PM_STATE_SUMS
    static uint32_t sum; /* checksum of the tensor in progress, up to here */
    static int has_sum;
    if (offset == 0 && !error) {
        has_sum = pm_has_sum(slot);
        if (has_sum) sum = pm_sum_begin(slot, 1);
    }
    if (!error && has_sum) {
        sum = pm_sum_on(sum, from, bytes);
        if (offset + bytes == pm_bytes_of(slot)) error = pm_sum_write(slot, address - offset, sum);
    }
#endif
    return error;
}
#endif

#if PM_MAPPED
#if PM_STATE_SUMS
int pm_page_check(uint32_t slot)
{
    uint32_t address;
    const int error = pm_find(slot, 0, 0, &address);
    if (error || !pm_has_sum(slot)) return error;
    const void *const data = pm_storage_address(address);
    if (!data) return PM_ERROR_PAGE;
    return pm_sum_compare(slot, address, pm_sum_on(pm_sum_begin(slot, 0), data, pm_bytes_of(slot)));
}
#endif
#endif

#endif

#ifdef PM_FLASH_DRIVER
/* Start of storage in the chip, the partition or the area: addresses before may have other data, such as a second
   network. */
#ifndef PM_FLASH_START
#define PM_FLASH_START 0u
#endif
#if PM_FLASH_START % PM_STORAGE_BLOCK
#error "PM_FLASH_START: storage begins where an erase block does, at a multiple of PM_STORAGE_BLOCK (PM_COMMIT_BLOCK where storage forgets)"
#endif

/* Returns whether storage fits a flash of this size. */
static inline int pm_flash_holds(uint32_t bytes)
{
    return (uint64_t)PM_FLASH_START + pm_end() <= bytes;
}
#endif

#endif
