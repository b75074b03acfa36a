/* Stored samples: the tensors that nodes after the frozen front read, in groups on storage. A place is a range of
   addresses for one group, with the slot number PM_SLOTS + place. A group is written as a
   whole to a place without a valid group, and is valid when its seal is written: a power cut leaves the old group or
   the new one. It has a header, samples, each with a checksum, and the seal, and is written in chunks. The newest group
   states the number of samples. */
#include "pm_runtime.h"

#if PM_REPLAY

#include "pm_groups.h"
#include "pm_state.h"

enum { SUM_BYTES = 4, PIECE_BYTES = 64, FORMAT = 2 };

#define SAMPLE_BYTES (PM_SAMPLE_BYTES * PM_SCALE)
#define LOGICAL (PM_GROUPS - 1u) /* number of groups; there is one place more */
#define NO_PLACE 0xFFFFu
#define SEAL_PLACE pm_group_seal_offset(PM_GROUP_SAMPLES, SAMPLE_BYTES, PM_CHUNK)

_Static_assert(sizeof(pm_group_t) == PM_GROUP_HEADER_BYTES, "the header of a group");
_Static_assert(LOGICAL <= NO_PLACE - 1u && PM_REPLAY < 0xFFFFu, "groups and samples have numbers of 16 bits");

#ifndef PM_SEED
#define PM_SEED 0u /* as in pm_random.h */
#endif

uint32_t pm_seen;
static uint32_t stored;            /* number of samples */
static uint32_t newest;            /* highest number of all groups */
static uint16_t places[PM_GROUPS]; /* place of each group, or NO_PLACE; then the place for the next write */

/* The group in the process of being written. */
static struct {
    uint32_t slot, end, sample; /* `sample` is the one that is stored, replaced or dropped */
    uint32_t sum;               /* checksum of the sample in progress */
    pm_group_t header;
} writing;

static struct {
    unsigned char bytes[(PM_CHUNK + PM_ALIGNMENT - 1u) / PM_ALIGNMENT * PM_ALIGNMENT];
} chunk __attribute__((aligned(PM_ALIGNMENT)));

static struct {
    unsigned char bytes[(PM_SAMPLE_INPUT_BYTES * PM_SCALE + PM_ALIGNMENT) / PM_ALIGNMENT * PM_ALIGNMENT];
} stored_inputs __attribute__((aligned(PM_ALIGNMENT)));

/* Returns a random number below `below`, from a counter, a stream (0: replaced samples, 1: samples of steps) and
   PM_SEED. It does not use the counters of steps' masks, and so does not change these. The mixing is that of the
   "lowbias32" function of Chris Wellons' hash prospector. */
static uint32_t draw(uint32_t counter, uint32_t stream, uint32_t below)
{
    uint32_t x = (counter * 2u + stream + 0x9E3779B9u) ^ (PM_SEED * 0x85EBCA6Bu);
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    x ^= x >> 16;
    return (uint32_t)((uint64_t)x * below >> 32);
}

static uint32_t sample_id(void)
{
    const uint32_t parts[] = {PM_SAMPLE_ID, PM_CHUNK, PM_COMMIT_BLOCK, SAMPLE_BYTES, PM_GROUP_SAMPLES, FORMAT};
    return pm_checksum(0, parts, sizeof parts);
}

static uint32_t run_number(void)
{
#if PM_COMMIT
    return pm_run_number();
#else
    return 0;
#endif
}

static uint32_t part_bytes(uint32_t part)
{
    return (pm_sample_parts[part] + 3u) / 4u * 4u * PM_SCALE;
}

static uint32_t part_offset(uint32_t part)
{
    uint32_t offset = 0;
    for (uint32_t k = 0; k < part; k++) offset += part_bytes(k);
    return offset;
}

static uint32_t place_of(uint32_t sample)
{
    return PM_GROUP_HEADER_BYTES + sample % PM_GROUP_SAMPLES * SAMPLE_BYTES;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint32_t pm_samples(void)
{
    return stored;
}

/* -- places ----------------------------------------------------------------------------------- */

static int has_group(uint32_t place)
{
    for (uint32_t group = 0; group < LOGICAL; group++) {
        if (places[group] == place) return 1;
    }
    return 0;
}

/* Finds a place without a group, from a given one on, for the next write. */
static void find_free(uint32_t place)
{
    while (has_group(place % PM_GROUPS)) place++;
    places[LOGICAL] = (uint16_t)(place % PM_GROUPS);
}

void pm_replay_clear(void)
{
    for (uint32_t group = 0; group < LOGICAL; group++) places[group] = NO_PLACE;
    pm_seen = stored = newest = 0;
    places[LOGICAL] = 0;
}

/* Reads bytes of a place; they become 0 if they are not there yet, or the driver reports damage. */
static int read_place(uint32_t place, uint32_t offset, void *to, uint32_t bytes)
{
    const int error = pm_page_read(PM_SLOTS + place, offset, to, bytes);
    if (error == PM_ERROR_SHORT || error == PM_ERROR_CHECKSUM) memset(to, 0, bytes);
    else if (error) return pm_page_error(error);
    return PM_OK;
}

/* Reads the header at a place; its number becomes 0 if the group is incomplete, or of other samples or another run. */
static int read_header(uint32_t place, pm_group_t *header)
{
    uint32_t seal[2], expected[2];
    PM_TRY(read_place(place, 0, header, PM_GROUP_HEADER_BYTES));
    PM_TRY(read_place(place, SEAL_PLACE, seal, PM_GROUP_SEAL_BYTES));
    pm_group_seal(header, expected);
    if (pm_group_is_of(header, run_number()) < 0 || seal[0] != expected[0] || seal[1] != expected[1] ||
        header->sample_id != sample_id() || header->group >= LOGICAL) {
        header->number = 0;
    }
    return PM_OK;
}

int pm_replay_highest_run(uint32_t *run)
{
    pm_group_t header;
    *run = 0;
    for (uint32_t place = 0; place < PM_GROUPS; place++) {
        PM_TRY(read_place(place, 0, &header, PM_GROUP_HEADER_BYTES));
        for (uint32_t k = 0; k < 2u && header.checksum == pm_group_sum(&header); k++) {
            if (header.runs[k] > *run) *run = header.runs[k];
        }
    }
    return PM_OK;
}

int pm_replay_load(void)
{
    pm_group_t header, other;
    pm_replay_clear();
    for (uint32_t place = 0; place < PM_GROUPS; place++) {
        PM_TRY(read_header(place, &header));
        if (header.number == 0) continue;
        uint16_t *const known = &places[header.group];
        if (*known != NO_PLACE) PM_TRY(read_header(*known, &other));
        if (*known == NO_PLACE || other.number < header.number) *known = (uint16_t)place;
        if (header.number > newest) {
            newest = header.number;
            pm_seen = header.seen;
            stored = least(header.samples, PM_REPLAY);
        }
    }
    find_free(0);
    return PM_OK;
}

/* -- storing a sample -------------------------------------------------------------------------- */

static int write_chunk(void)
{
    const uint32_t filled = writing.end % PM_CHUNK;
    const uint32_t begin = filled ? writing.end - filled : writing.end - PM_CHUNK;
    PM_TRY_PAGE(pm_page_write(writing.slot, begin, chunk.bytes, writing.end - begin));
    return PM_OK;
}

/* Adds bytes to the group; zeros if `from` is 0. */
static int put(const void *from, uint32_t bytes)
{
    const unsigned char *next = from;
    while (bytes) {
        const uint32_t filled = writing.end % PM_CHUNK, left = PM_CHUNK - filled, now = least(bytes, left);
        if (next) memcpy(chunk.bytes + filled, next, now), next += now;
        else memset(chunk.bytes + filled, 0, now);
        writing.end += now, bytes -= now;
        if (now == left) PM_TRY(write_chunk());
    }
    return PM_OK;
}

/* Copies a stored sample with its checksum. Zeros, whose checksum is wrong, take the place of one whose group is lost. */
static int copy_sample(uint32_t sample)
{
    unsigned char piece[PIECE_BYTES];
    const uint32_t place = places[sample / PM_GROUP_SAMPLES];
    if (place == NO_PLACE) return put(0, SAMPLE_BYTES);
    for (uint32_t at = 0; at < SAMPLE_BYTES;) {
        const uint32_t now = least(SAMPLE_BYTES - at, PIECE_BYTES);
        PM_TRY_PAGE(pm_page_read(PM_SLOTS + place, place_of(sample) + at, piece, now));
        PM_TRY(put(piece, now));
        at += now;
    }
    return PM_OK;
}

/* Begins the new version of the group of a sample, with the samples before it; the counts are those after it. */
static int begin_group(uint32_t seen, uint32_t samples)
{
    pm_group_t *const header = &writing.header;
    const uint32_t group = writing.sample / PM_GROUP_SAMPLES;
    memset(header, 0, sizeof *header);
    header->sample_id = sample_id();
    header->runs[0] = run_number();
    header->number = newest + 1u;
    header->seen = seen;
    header->samples = (uint16_t)samples;
    header->group = (uint16_t)group;
    header->places[0] = places[LOGICAL];
    header->checksum = pm_group_sum(header);
    writing.slot = PM_SLOTS + places[LOGICAL];
    writing.end = writing.sum = 0;
    PM_TRY(put(header, PM_GROUP_HEADER_BYTES));
    for (uint32_t k = group * PM_GROUP_SAMPLES; k < writing.sample; k++) PM_TRY(copy_sample(k));
    return PM_OK;
}

/* Ends it with the samples after that one, and the seal. */
static int end_group(void)
{
    uint32_t seal[2];
    const pm_group_t *const header = &writing.header;
    const uint32_t end = least(header->samples, (header->group + 1u) * PM_GROUP_SAMPLES);
    for (uint32_t k = writing.sample + 1u; k < end; k++) PM_TRY(copy_sample(k));
    if (SEAL_PLACE >= PM_COMMIT_BLOCK) PM_TRY(put(0, SEAL_PLACE - writing.end)); /* a block is erased where it begins */
    else if (writing.end % PM_CHUNK) PM_TRY(write_chunk());
    pm_group_seal(header, seal);
    memcpy(chunk.bytes, seal, sizeof seal);
    PM_TRY_PAGE(pm_page_write(writing.slot, SEAL_PLACE, chunk.bytes, PM_GROUP_SEAL_BYTES));
    const uint32_t before = places[header->group];
    places[header->group] = places[LOGICAL];
    if (before == NO_PLACE) find_free(places[LOGICAL] + 1u);
    else places[LOGICAL] = (uint16_t)before;
    newest = header->number;
    pm_seen = header->seen;
    stored = header->samples;
    return PM_OK;
}

int pm_sample_write(uint32_t part, const void *from, uint32_t bytes)
{
    static const unsigned char zeros[8];
    const uint32_t padding = part_bytes(part) - bytes;
    if (part == 0) PM_TRY(begin_group(pm_seen + 1u, writing.sample < stored ? stored : stored + 1u));
    PM_TRY(put(from, bytes));
    PM_TRY(put(0, padding));
    writing.sum = pm_checksum(pm_checksum(writing.sum, from, bytes), zeros, padding);
    return PM_OK;
}

static int write_inputs(const void *const inputs[PM_INPUTS])
{
    for (uint32_t k = 0; k < PM_SAMPLE_INPUTS; k++) {
        const uint32_t part = PM_SAMPLE_OUTPUTS + k;
        PM_TRY(pm_sample_write(part, inputs[pm_sample_inputs[k]], pm_sample_parts[part] * PM_SCALE));
    }
    PM_TRY(put(&writing.sum, SUM_BYTES));
    return put(0, SUM_BYTES * (PM_SCALE - 1u));
}

/* Checks the inputs of the step that has begun. */
static int check_inputs(void)
{
    pm_progress.is_checked = 1;
    const int error = pm_run_nodes(0);
    pm_progress.is_checked = 0;
    return error;
}

int pm_keep_sample(const void *const inputs[PM_INPUTS], uint32_t *sample)
{
    const uint32_t index = stored < PM_REPLAY ? stored : draw(pm_seen, 0, pm_seen + 1u);
    PM_TRY(pm_step_begin(inputs, PM_C(0.0)));
    int error = PM_OK;
    if (index < PM_REPLAY) {
        writing.sample = index;
        pm_progress.way = PM_WAY_KEEPS;
        error = pm_run_nodes(0xFFFFFFFFu);
        pm_progress.way = PM_WAY_WHOLE;
        if (!error) error = write_inputs(inputs);
        if (!error) error = end_group();
    } else {
        error = check_inputs();
        if (!error) pm_seen++;
    }
    pm_progress.slice = 0;
    if (!error && sample) *sample = index < PM_REPLAY ? index : PM_NO_SAMPLE;
    return error;
}

int pm_drop_sample(uint32_t sample)
{
    if (pm_holds != PM_HOLDS_STATE) return PM_ERROR_STATE;
    if (pm_progress.slice) return PM_ERROR_BUSY;
    if (sample >= stored) return PM_ERROR_INDEX;
    const uint32_t last = stored - 1u;
    writing.sample = sample;
    PM_TRY(begin_group(pm_seen, last));
    PM_TRY(sample < last ? copy_sample(last) : put(0, SAMPLE_BYTES));
    return end_group();
}

/* -- a step on a stored sample ---------------------------------------------------------------- */

static struct {
    uint32_t slot, offset;
} reading;

int pm_sample_read(uint32_t part, void *to, uint32_t bytes)
{
    PM_TRY_PAGE(pm_page_read(reading.slot, reading.offset + part_offset(part), to, bytes));
    return PM_OK;
}

/* Checks a sample on storage against its checksum. */
static int check_sample(void)
{
    const uint32_t end = part_offset(PM_SAMPLE_OUTPUTS + PM_SAMPLE_INPUTS);
    unsigned char piece[PIECE_BYTES];
    uint32_t sum = 0, found;
    for (uint32_t at = 0; at < end;) {
        const uint32_t now = least(end - at, PIECE_BYTES);
        PM_TRY_PAGE(pm_page_read(reading.slot, reading.offset + at, piece, now));
        sum = pm_checksum(sum, piece, now);
        at += now;
    }
    PM_TRY_PAGE(pm_page_read(reading.slot, reading.offset + end, &found, SUM_BYTES));
    return sum == found ? PM_OK : PM_ERROR_CHECKSUM;
}

static int read_inputs(void)
{
    for (uint32_t k = 0, at = 0; k < PM_SAMPLE_INPUTS; k++) {
        const uint32_t part = PM_SAMPLE_OUTPUTS + k;
        PM_TRY(pm_sample_read(part, stored_inputs.bytes + at, pm_sample_parts[part] * PM_SCALE));
        pm_progress.inputs[pm_sample_inputs[k]] = stored_inputs.bytes + at;
        at += part_bytes(part);
    }
    return PM_OK;
}

static int begin_stored(uint32_t sample, pm_real lr)
{
    static const void *none[PM_INPUTS];
    const uint32_t place = places[sample / PM_GROUP_SAMPLES];
    if (place == NO_PLACE) return PM_ERROR_CHECKSUM;
    reading.slot = PM_SLOTS + place;
    reading.offset = place_of(sample);
    PM_TRY(check_sample());
    PM_TRY(pm_step_begin(none, lr));
    int error = read_inputs();
    pm_progress.way = PM_WAY_STORED;
    if (!error) error = check_inputs();
    if (error) pm_progress.slice = 0;
    return error;
}

int pm_step_stored_begin(uint32_t sample, pm_real lr)
{
#if PM_COMMIT
    const uint32_t counter = pm_steps;
#else
    static uint32_t counter;
#endif
    if (pm_holds != PM_HOLDS_STATE) return PM_ERROR_STATE;
    if (pm_progress.slice) return PM_ERROR_BUSY;
    if (stored == 0) return PM_ERROR_EMPTY;
    if (sample != PM_ANY_SAMPLE) return sample < stored ? begin_stored(sample, lr) : PM_ERROR_INDEX;
    /* Passes over samples that are damaged: draws anew, and then tries all samples in turn. */
    int error = PM_OK;
    for (uint32_t k = 0; k < 2u * stored; k++) {
        const uint32_t drawn = draw(counter + least(k, stored - 1u) * 0x5BD1E995u, 1, stored);
        error = begin_stored(k < stored ? drawn : (drawn + k) % stored, lr);
        if (error != PM_ERROR_CHECKSUM && error != PM_ERROR_INPUT) break;
    }
#if !PM_COMMIT
    counter += error == PM_OK;
#endif
    return error;
}

int pm_step_stored(uint32_t sample, pm_real lr, pm_real *loss)
{
    PM_TRY(pm_step_stored_begin(sample, lr));
    const int error = pm_step_some(0xFFFFFFFFu);
    if (!error) *loss = pm_progress.loss;
    return error;
}

#if PM_TAKES_SAMPLES
/* -- samples of the step before a migration ---------------------------------------------------- */

/* A place of this step, of the other step, or of both. A group in the latter can belong to both. */
enum { OWN = 1, OLD = 2 };

static struct {
    uint32_t run, new_run;
    uint32_t seen, samples;
    uint32_t base; /* address of its first place */
    const uint32_t (*ranges)[2];
} old;

/* Returns the address of a place of this step. */
static uint32_t own_address(uint32_t place)
{
    uint32_t begin, end;
    pm_old_place(PM_PLACES + place, &begin, &end);
    return begin;
}

static uint32_t group_bytes(void)
{
    return (SEAL_PLACE + PM_CHUNK + PM_COMMIT_BLOCK - 1u) / PM_COMMIT_BLOCK * PM_COMMIT_BLOCK;
}

/* Returns which places are at an address; their numbers become `numbers`. */
static uint32_t find_kinds(uint32_t address, uint16_t numbers[2])
{
    const uint32_t bases[2] = {old.base, own_address(0)}, counts[2] = {PM_OLD_GROUPS, PM_GROUPS};
    const uint32_t bits[2] = {OLD, OWN};
    uint32_t kinds = 0;
    for (int k = 0; k < 2; k++) {
        const uint32_t number = (address - bases[k]) / group_bytes();
        numbers[k] = (uint16_t)number;
        if (address >= bases[k] && (address - bases[k]) % group_bytes() == 0 && number < counts[k]) kinds |= bits[k];
    }
    return kinds;
}

/* Reads the header at an address; its number becomes 0 unless a whole group of the other step begins there. */
static int read_old_header(uint32_t address, pm_group_t *header, int *which)
{
    uint32_t seal[2], expected[2];
    PM_TRY_PAGE(pm_old_read(address, header, PM_GROUP_HEADER_BYTES));
    *which = pm_group_is_of(header, old.run);
    if (*which >= 0 && header->sample_id == sample_id()) {
        PM_TRY_PAGE(pm_old_read(address + SEAL_PLACE, seal, PM_GROUP_SEAL_BYTES));
        pm_group_seal(header, expected);
        if (seal[0] == expected[0] && seal[1] == expected[1]) return PM_OK;
    }
    header->number = 0;
    return PM_OK;
}

/* Finds the newest version of a group of the other step on all of storage, or of any group (NO_PLACE). Its number
   becomes 0 if there is none. */
static int find_old_group(uint32_t group, pm_group_t *header, uint32_t *address)
{
    pm_group_t found;
    int which;
    header->number = 0;
    for (uint32_t at = 0; at + group_bytes() <= pm_old_end(); at += PM_COMMIT_BLOCK) {
        PM_TRY(read_old_header(at, &found, &which));
        if (found.number <= header->number || (group != NO_PLACE && found.group != group)) continue;
        *header = found;
        *address = at;
        if (group == NO_PLACE) old.base = at - found.places[which] * group_bytes();
    }
    return PM_OK;
}

/* Returns whether either step's state or samples need a place; an error of storage is negative. */
static int is_needed(uint32_t address)
{
    pm_group_t header;
    const uint32_t end = address + group_bytes();
    for (int k = 0; k < 2; k++) {
        if (address < old.ranges[k][1] && old.ranges[k][0] < end) return 1;
    }
    if (end > pm_old_end()) return 1;
    uint32_t at = address < group_bytes() ? 0 : address - group_bytes() + PM_COMMIT_BLOCK;
    for (; at < end; at += PM_COMMIT_BLOCK) {
        const int error = pm_old_read(at, &header, PM_GROUP_HEADER_BYTES);
        if (error) return -pm_page_error(error);
        if (pm_group_is_of(&header, old.new_run) >= 0) return 1;
        if (pm_group_is_of(&header, old.run) < 0) continue;
        uint32_t live = places[header.group < LOGICAL ? header.group : 0] * PM_COMMIT_BLOCK;
        if (header.group >= LOGICAL) { /* this step has no place for it */
            const int failure = find_old_group(header.group, &header, &live);
            if (failure) return -failure;
        }
        if (live == at) return 1;
    }
    return 0;
}

/* Finds a free place of certain kinds, and its numbers. Returns PM_ERROR_SLOT if there is none. */
static int find_place(uint32_t kinds, uint32_t *address, uint16_t numbers[2])
{
    const uint32_t count = kinds & OWN ? PM_GROUPS : PM_OLD_GROUPS;
    for (uint32_t k = 0; k < count; k++) {
        *address = kinds & OWN ? own_address(k) : old.base + k * group_bytes();
        if (find_kinds(*address, numbers) != kinds) continue;
        const int needed = is_needed(*address);
        if (needed < 0) return -needed;
        if (!needed) return PM_OK;
    }
    return PM_ERROR_SLOT;
}

/* Copies a group to another place, with a number of its own, for the steps of `kinds`. */
static int move_group(uint32_t from, uint32_t to, uint32_t kinds, const uint16_t numbers[2])
{
    pm_group_t header;
    uint32_t seal[2];
    PM_TRY_PAGE(pm_old_read(from, &header, PM_GROUP_HEADER_BYTES));
    header.runs[0] = kinds & OLD ? old.run : old.new_run;
    header.places[0] = kinds & OLD ? numbers[0] : numbers[1];
    header.runs[1] = kinds == (OWN | OLD) ? old.new_run : 0;
    header.places[1] = kinds == (OWN | OLD) ? numbers[1] : 0;
    header.number = ++newest;
    header.seen = old.seen;
    header.samples = (uint16_t)old.samples;
    header.checksum = pm_group_sum(&header);
    for (uint32_t at = 0; at < SEAL_PLACE; at += PM_CHUNK) {
        PM_TRY_PAGE(pm_old_read(from + at, chunk.bytes, PM_CHUNK));
        if (at == 0) memcpy(chunk.bytes, &header, sizeof header);
        PM_TRY_PAGE(pm_old_write(to + at, chunk.bytes, PM_CHUNK));
    }
    pm_group_seal(&header, seal);
    memcpy(chunk.bytes, seal, sizeof seal);
    PM_TRY_PAGE(pm_old_write(to + SEAL_PLACE, chunk.bytes, PM_GROUP_SEAL_BYTES));
    return PM_OK;
}

/* Groups in places of both steps are written anew for both, one after the other: each leaves its place to the next one.
   If none is free at first, one moves to a place that only the other step has. All others are copied. */
int pm_replay_take(uint32_t from_run, uint32_t to_run, const uint32_t ranges[2][2])
{
    pm_group_t header;
    uint32_t to = 0;
    uint16_t numbers[2];
    old.run = from_run, old.new_run = to_run, old.ranges = ranges;
    pm_replay_clear();
    PM_TRY(find_old_group(NO_PLACE, &header, &to));
    newest = header.number;
    if (!newest) return PM_OK;
    old.seen = header.seen, old.samples = header.samples;
    const uint32_t used = (least(old.samples, PM_REPLAY) + PM_GROUP_SAMPLES - 1u) / PM_GROUP_SAMPLES;
    for (uint32_t group = 0; group < used; group++) {
        PM_TRY(find_old_group(group, &header, &to));
        if (header.number && to / PM_COMMIT_BLOCK < NO_PLACE) places[group] = (uint16_t)(to / PM_COMMIT_BLOCK);
    }
    for (uint32_t pass = 0; pass < 2u; pass++) {
        for (uint32_t group = 0; group < used; group++) {
            const uint32_t from = places[group] * PM_COMMIT_BLOCK;
            const uint32_t turn = find_kinds(from, numbers) & OWN ? 0 : 1u;
            if (places[group] == NO_PLACE || turn != pass) continue;
            uint32_t kinds = OWN | OLD;
            int error = find_place(kinds, &to, numbers);
            if (error == PM_ERROR_SLOT && pass == 0) error = find_place(kinds = OLD, &to, numbers);
            if (error == PM_ERROR_SLOT) error = find_place(kinds = OWN, &to, numbers);
            if (!error) error = move_group(from, to, kinds, numbers);
            if (error) return error;
            if (kinds & OLD) places[group] = (uint16_t)(to / PM_COMMIT_BLOCK);
        }
    }
    return PM_OK;
}
#endif
#endif
