/* Migration: copies the state of another step of this device from storage to a new generation. It reads the newest
   complete generation of that step, at any address, and writes the new one to blocks without data of the old one:
   until the new seal is written, a power cut leaves the old state. */
#include "pm_runtime.h"

#if PM_MIGRATES

#include "pm_generation.h"
#include "pm_groups.h"
#include "pm_state.h"

enum { STEP_BYTES = 256, PIECE_BYTES = 64 }; /* generations that share a block begin at pages of flash */

/* The generation to read. */
static struct {
    uint32_t address, number, run, steps;
    int is_open;
} old;

/* Returns the alignment of the tensors of that generation [bytes]. */
static uint32_t unit(void)
{
    const uint32_t found = pm_old_unit();
    return found > sizeof(pm_real) ? found : (uint32_t)sizeof(pm_real);
}

static uint32_t slot_offset(uint32_t slot)
{
    return pm_slot_offset(slot, pm_old_bytes, PM_OLD_TENSORS, unit(), PM_OLD_STATE_SUMS);
}

static uint32_t generation_end(uint32_t address)
{
    return pm_up(address + slot_offset(PM_OLD_TENSORS + 2u), PM_COMMIT_BLOCK);
}

/* Reads the record at an address. Its number becomes 0 unless a complete generation of the other step begins there, and
   has its seal before `end`. Returns PM_OK, or an error of storage. */
static int read_ends(uint32_t address, uint32_t end, pm_record_t *record)
{
    const uint32_t layout = pm_layout_hash(PM_OLD_LAYOUT_ID, PM_OLD_COMMIT_UNIT, PM_OLD_COMMIT_BLOCK, PM_OLD_STATE_SUMS,
                                           PM_SHARED_HERE(PM_OLD_SHARED), 0);
    pm_seal_t seal;
    PM_TRY_PAGE(pm_old_read(address, record, PM_RECORD_BYTES));
    const int is_sound = record->checksum == pm_record_sum(record) && record->instance_id == PM_OLD_INSTANCE_ID &&
                         record->step_id == PM_OLD_STEP_ID && record->number;
    const uint32_t place = address + slot_offset(PM_OLD_TENSORS + 1u);
    if (!is_sound || place + PM_SEAL_BYTES > end) {
        record->number = 0;
        return PM_OK;
    }
    PM_TRY_PAGE(pm_old_read(place, &seal, PM_SEAL_BYTES));
    const pm_seal_t right = pm_seal_of(record, PM_OLD_INSTANCE_ID, PM_OLD_STEP_ID, layout);
    const int is_whole = seal.mark == right.mark && seal.check == right.check;
    if (!is_whole || (record->layout_id & ~PM_COUNT_BITS) != layout) record->number = 0;
    return PM_OK;
}

/* Compares the tensors of a generation with their checksums. Returns PM_ERROR_CHECKSUM if any differs. */
static int check_tensors(uint32_t address, uint32_t number)
{
    unsigned char piece[PIECE_BYTES];
    for (uint32_t k = 0; PM_OLD_STATE_SUMS && k < PM_OLD_TENSORS; k++) {
        const uint32_t begin = address + slot_offset(k + 1u), bytes = pm_old_bytes[k] * PM_SCALE;
        const uint32_t key[3] = {PM_OLD_LAYOUT_ID, PM_OLD_PAGE_SLOTS + k + 1u, number};
        uint32_t sum = pm_sum_on(0, key, sizeof key), stored;
        for (uint32_t at = 0; at < bytes;) {
            const uint32_t now = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
            PM_TRY_PAGE(pm_old_read(begin + at, piece, now));
            sum = pm_sum_on(sum, piece, now);
            at += now;
        }
        PM_TRY_PAGE(pm_old_read(begin + pm_up(bytes, unit()), &stored, 4u));
        if (stored != sum) return PM_ERROR_CHECKSUM;
    }
    return PM_OK;
}

/* Finds the newest generation with a number below `below`, and stores it in `old`. Generations begin at multiples of
   256 within a block. Returns PM_ERROR_EMPTY if there is none. */
static int find_newest(uint32_t below)
{
    const uint32_t end = pm_old_end();
    pm_record_t record;
    old.number = 0;
    for (uint32_t address = 0; address + PM_RECORD_BYTES <= end; address += STEP_BYTES) {
        PM_TRY(read_ends(address, end, &record));
        if (record.number > old.number && record.number < below) {
            old.address = address;
            old.number = record.number;
            old.run = record.run;
            old.steps = record.steps;
        }
    }
    return old.number ? PM_OK : PM_ERROR_EMPTY;
}

/* Copies the old generation to another address, piece by piece, and its seal last: after a power cut, the copy is
   complete or the old one is. Then `old` is the copy. */
static int move_to(uint32_t address)
{
    unsigned char piece[PM_COMMIT_UNIT > PIECE_BYTES ? PM_COMMIT_UNIT : PIECE_BYTES];
    const uint32_t seal = slot_offset(PM_OLD_TENSORS + 1u);
    for (uint32_t at = 0; at < seal;) {
        const uint32_t now = seal - at < sizeof piece ? seal - at : (uint32_t)sizeof piece;
        PM_TRY_PAGE(pm_old_read(old.address + at, piece, now));
        PM_TRY_PAGE(pm_old_write(address + at, piece, now));
        at += now;
    }
    PM_TRY_PAGE(pm_old_read(old.address + seal, piece, PM_SEAL_BYTES));
    PM_TRY_PAGE(pm_old_write(address + seal, piece, PM_SEAL_BYTES));
    old.address = address;
    return PM_OK;
}

#if PM_OLD_REPLAY
#define OLD_SEAL pm_group_seal_offset(PM_OLD_GROUP_SAMPLES, PM_OLD_SAMPLE_BYTES * PM_SCALE, PM_OLD_CHUNK)

/* Reads the header at an address, and determines whether a group of the old state begins there. */
static int read_group(uint32_t address, pm_group_t *header, int *is_there)
{
    uint32_t seal[2], expected[2];
    *is_there = 0;
    if (address + OLD_SEAL + PM_GROUP_SEAL_BYTES > pm_old_end()) return PM_OK;
    PM_TRY_PAGE(pm_old_read(address, header, PM_GROUP_HEADER_BYTES));
    if (pm_group_is_of(header, old.run) < 0) return PM_OK;
    PM_TRY_PAGE(pm_old_read(address + OLD_SEAL, seal, PM_GROUP_SEAL_BYTES));
    pm_group_seal(header, expected);
    *is_there = seal[0] == expected[0] && seal[1] == expected[1];
    return PM_OK;
}

/* Determines whether bytes from `begin` to `end` have samples of the old state. */
static int find_samples(uint32_t begin, uint32_t end, int *any)
{
    const uint32_t step = PM_OLD_COMMIT_BLOCK, bytes = pm_up(OLD_SEAL + PM_OLD_CHUNK, step);
    pm_group_t header, other;
    int is_newest, is_other;
    *any = 0;
    for (uint32_t at = begin < bytes ? 0 : pm_up(begin - bytes + 1u, step); at < end; at += step) {
        PM_TRY(read_group(at, &header, &is_newest));
        for (uint32_t k = 0; is_newest && k < pm_old_end(); k += step) {
            PM_TRY(read_group(k, &other, &is_other));
            is_newest = !is_other || other.group != header.group || other.number <= header.number;
        }
        *any |= is_newest;
    }
    return PM_OK;
}
#endif

/* Determines whether bytes from `begin` to `end` are apart from the old generation, at any address, and, if that is
   asked for, from its samples. */
static int is_apart(uint32_t begin, uint32_t end, uint32_t address, int spares_samples, int *apart)
{
    *apart = end <= address / PM_COMMIT_BLOCK * PM_COMMIT_BLOCK || begin >= generation_end(address);
#if PM_OLD_REPLAY
    int any = 0;
    if (*apart && spares_samples) PM_TRY(find_samples(begin, end, &any));
    *apart &= !any;
#else
    (void)spares_samples;
#endif
    return PM_OK;
}

/* Finds a place for the new generation in blocks without data of the old one at an address. Returns PM_ERROR_SLOT if
   there is none. */
static int find_place_beside(uint32_t address, int spares_samples, uint32_t *place)
{
    uint32_t begin, end;
    int apart;
    for (*place = 0; *place < PM_GENERATIONS; *place += PM_SHARED) {
        pm_old_place(*place, &begin, &end);
        PM_TRY(is_apart(begin, end, address, spares_samples, &apart));
        if (apart) return PM_OK;
    }
    return PM_ERROR_SLOT;
}

/* Finds a place for the new generation; moves the old one if necessary. Returns PM_ERROR_SLOT if there is none. */
static int find_place(int spares_samples, uint32_t *place)
{
    int error = find_place_beside(old.address, spares_samples, place), apart;
    for (uint32_t to = 0; error == PM_ERROR_SLOT && generation_end(to) <= pm_old_end(); to += PM_COMMIT_BLOCK) {
        PM_TRY(is_apart(to, generation_end(to), old.address, spares_samples, &apart));
        if (!apart) continue;
        error = find_place_beside(to, spares_samples, place);
        if (!error) return move_to(to);
    }
    return error;
}

int pm_migrated_values(uint32_t buffer, uint32_t first, uint32_t count, uint32_t size, void *to)
{
    for (uint32_t k = 0; old.is_open && k < PM_MIGRATED_PIECES; k++) {
        const pm_migrated_t *piece = &pm_migrated[k];
        const uint32_t low = piece->first > first ? piece->first : first;
        const uint32_t end = piece->first + piece->count, last = first + count;
        const uint32_t high = end < last ? end : last;
        if (piece->buffer != buffer || low >= high) continue;
        const uint32_t from = slot_offset(piece->tensor + 1u) + (piece->offset + low - piece->first) * size;
        void *const place = (unsigned char *)to + (size_t)(low - first) * size;
        PM_TRY_PAGE(pm_old_read(old.address + from, place, (high - low) * size));
    }
    return PM_OK;
}

int pm_migrate(void)
{
    uint32_t below = 0xFFFFFFFFu, place = 0;
    int error, is_older = 0;
    pm_holds = PM_HOLDS_NOTHING;
    old.is_open = 0;
    for (;;) {
        error = find_newest(below);
        if (error == PM_ERROR_EMPTY && is_older) return PM_ERROR_CHECKSUM;
        if (error) return error;
        error = check_tensors(old.address, old.number);
        if (error != PM_ERROR_CHECKSUM) break;
        is_older = 1;
        below = old.number;
    }
    PM_TRY(error);
    error = find_place(1, &place);
    if (error == PM_ERROR_SLOT) error = find_place(0, &place);
    PM_TRY(error);
    pm_migrated_state_t from = {
        old.number, old.run, old.steps,
        {{old.address / PM_COMMIT_BLOCK * PM_COMMIT_BLOCK, generation_end(old.address)}, {0, 0}},
    };
    pm_old_place(place, &from.ranges[1][0], &from.ranges[1][1]);
    old.is_open = 1;
    error = pm_begin_at(place, &from);
    old.is_open = 0;
    return error ? error : is_older ? PM_RESUMED_OLDER : PM_OK;
}

#endif
