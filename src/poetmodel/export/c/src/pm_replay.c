/* Stored samples: the tensors that nodes after the frozen front read, in groups on storage. A place is a range of
   addresses for one group, with the slot number PM_SLOTS + place. A group is written as a
   whole to a place without a valid group, and is valid when its seal is written: a power cut leaves the old group or
   the new one. It has a header, samples, each with a checksum, and the seal, and is written in chunks. */
#include "pm_runtime.h"

#if PM_REPLAY

#include "pm_checksum.h"
#include "pm_state.h"

enum { HEADER_BYTES = 32, SEAL_BYTES = 8, SUM_BYTES = 4, PIECE_BYTES = 64 };

#define SAMPLE_BYTES (PM_SAMPLE_BYTES * PM_SCALE)
#define LOGICAL (PM_GROUPS - 1u) /* number of groups; there is one place more */
#define NO_PLACE 0xFFFFu
#define SEAL_PLACE ((HEADER_BYTES + PM_GROUP_SAMPLES * SAMPLE_BYTES + PM_CHUNK - 1u) / PM_CHUNK * PM_CHUNK)
#define SEAL_MARK 0x6B2FD149u

/* The header of a group; `number` counts written groups since pm_init. */
typedef struct {
    uint32_t sample_id, run, number, group;
    uint32_t seen; /* pm_seen after the group is written */
    uint32_t zeros[2];
    uint32_t checksum;
} header_t;

_Static_assert(sizeof(header_t) == HEADER_BYTES, "the header of a group");
_Static_assert(LOGICAL <= NO_PLACE - 1u, "groups have numbers of 16 bits");

#ifndef PM_SEED
#define PM_SEED 0u /* as in pm_random.h */
#endif

uint32_t pm_seen;
static uint32_t newest;            /* highest number of all groups */
static uint16_t places[PM_GROUPS]; /* place of each group, or NO_PLACE; then the place for the next write */

/* The group in the process of being written. */
static struct {
    uint32_t slot, end, group, first, sample, samples; /* first sample; final number of samples */
    uint32_t sum;                                      /* checksum of the sample in progress */
    header_t header;
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
    const uint32_t parts[] = {PM_SAMPLE_ID, PM_INSTANCE_ID, PM_CHUNK, PM_COMMIT_BLOCK, SAMPLE_BYTES, PM_REPLAY};
    return pm_checksum(0, parts, sizeof parts);
}

static uint32_t header_sum(const header_t *header)
{
    return pm_checksum(0x504D5332u, header, (uint32_t)(sizeof *header - sizeof header->checksum));
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
    return HEADER_BYTES + sample % PM_GROUP_SAMPLES * SAMPLE_BYTES;
}

uint32_t pm_samples(void)
{
    return pm_seen < PM_REPLAY ? pm_seen : PM_REPLAY;
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
    pm_seen = newest = 0;
    places[LOGICAL] = 0;
}

/* Reads the header at a place; its number becomes 0 if the group is incomplete, or of another step or pm_init. */
static int read_header(uint32_t place, header_t *header)
{
    uint32_t seal[2] = {0, 0};
    int error = pm_page_read(PM_SLOTS + place, 0, header, HEADER_BYTES);
    if (!error) error = pm_page_read(PM_SLOTS + place, SEAL_PLACE, seal, SEAL_BYTES);
    if (error && error != PM_ERROR_SHORT && error != PM_ERROR_CHECKSUM) return pm_page_error(error);
    const uint32_t mark = header->number ^ SEAL_MARK;
    const int is_whole = !error && header->checksum == header_sum(header) && seal[0] == mark &&
                         seal[1] == (~mark ^ header->checksum) && header->sample_id == sample_id() &&
                         header->run == run_number() && header->group < LOGICAL;
    if (!is_whole) header->number = 0;
    return PM_OK;
}

int pm_replay_load(void)
{
    header_t header, other;
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

static int put(const void *from, uint32_t bytes)
{
    const unsigned char *next = from;
    while (bytes) {
        const uint32_t filled = writing.end % PM_CHUNK, left = PM_CHUNK - filled, now = bytes < left ? bytes : left;
        memcpy(chunk.bytes + filled, next, now);
        writing.end += now, next += now, bytes -= now;
        if (now == left) PM_TRY(write_chunk());
    }
    return PM_OK;
}

/* Copies samples `first` to below `end` of the old version of the group. */
static int copy_samples(uint32_t first, uint32_t end)
{
    unsigned char piece[PIECE_BYTES];
    for (uint32_t at = place_of(first); first < end && at < place_of(first) + (end - first) * SAMPLE_BYTES;) {
        const uint32_t left = place_of(first) + (end - first) * SAMPLE_BYTES - at;
        const uint32_t now = left < PIECE_BYTES ? left : PIECE_BYTES;
        PM_TRY_PAGE(pm_page_read(PM_SLOTS + places[writing.group], at, piece, now));
        PM_TRY(put(piece, now));
        at += now;
    }
    return PM_OK;
}

static int begin_group(void)
{
    header_t *const header = &writing.header;
    memset(header, 0, sizeof *header);
    header->sample_id = sample_id();
    header->run = run_number();
    header->number = newest + 1u;
    header->group = writing.group;
    header->seen = pm_seen + 1u;
    header->checksum = header_sum(header);
    writing.slot = PM_SLOTS + places[LOGICAL];
    writing.end = writing.sum = 0;
    PM_TRY(put(header, HEADER_BYTES));
    return copy_samples(writing.first, writing.sample);
}

int pm_sample_write(uint32_t part, const void *from, uint32_t bytes)
{
    static const unsigned char zeros[8];
    const uint32_t padding = part_bytes(part) - bytes;
    if (part == 0) PM_TRY(begin_group());
    PM_TRY(put(from, bytes));
    PM_TRY(put(zeros, padding));
    writing.sum = pm_checksum(pm_checksum(writing.sum, from, bytes), zeros, padding);
    return PM_OK;
}

static int end_group(const void *const inputs[PM_INPUTS])
{
    uint32_t seal[2];
    for (uint32_t k = 0; k < PM_SAMPLE_INPUTS; k++) {
        const uint32_t part = PM_SAMPLE_OUTPUTS + k;
        PM_TRY(pm_sample_write(part, inputs[pm_sample_inputs[k]], pm_sample_parts[part] * PM_SCALE));
    }
    static const unsigned char zeros[8];
    PM_TRY(put(&writing.sum, SUM_BYTES));
    PM_TRY(put(zeros, SUM_BYTES * (PM_SCALE - 1u)));
    PM_TRY(copy_samples(writing.sample + 1u, writing.first + writing.samples));
    if (writing.end % PM_CHUNK) PM_TRY(write_chunk());
    seal[0] = writing.header.number ^ SEAL_MARK;
    seal[1] = ~seal[0] ^ writing.header.checksum;
    memcpy(chunk.bytes, seal, sizeof seal);
    PM_TRY_PAGE(pm_page_write(writing.slot, SEAL_PLACE, chunk.bytes, SEAL_BYTES));
    return PM_OK;
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
    const uint32_t count = pm_samples();
    const uint32_t index = pm_seen < PM_REPLAY ? pm_seen : draw(pm_seen, 0, pm_seen + 1u);
    PM_TRY(pm_step_begin(inputs, PM_C(0.0)));
    if (index >= PM_REPLAY) {
        const int refused = check_inputs();
        pm_progress.slice = 0;
        if (refused) return refused;
        pm_seen++;
        if (sample) *sample = PM_NO_SAMPLE;
        return PM_OK;
    }
    writing.group = index / PM_GROUP_SAMPLES;
    writing.first = writing.group * PM_GROUP_SAMPLES;
    writing.sample = index;
    writing.samples = (index < count ? count : count + 1u) - writing.first;
    if (writing.samples > PM_GROUP_SAMPLES) writing.samples = PM_GROUP_SAMPLES;
    pm_progress.way = PM_WAY_KEEPS;
    int error = pm_run_nodes(0xFFFFFFFFu);
    pm_progress.way = PM_WAY_WHOLE;
    pm_progress.slice = 0;
    if (!error) error = end_group(inputs);
    if (error) return error;
    const uint32_t before = places[writing.group];
    places[writing.group] = places[LOGICAL];
    if (before == NO_PLACE) find_free(places[LOGICAL] + 1u);
    else places[LOGICAL] = (uint16_t)before;
    newest = writing.header.number;
    pm_seen++;
    if (sample) *sample = index;
    return PM_OK;
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
    uint32_t sum = 0, stored;
    for (uint32_t at = 0; at < end;) {
        const uint32_t now = end - at < PIECE_BYTES ? end - at : PIECE_BYTES;
        PM_TRY_PAGE(pm_page_read(reading.slot, reading.offset + at, piece, now));
        sum = pm_checksum(sum, piece, now);
        at += now;
    }
    PM_TRY_PAGE(pm_page_read(reading.slot, reading.offset + end, &stored, SUM_BYTES));
    return sum == stored ? PM_OK : PM_ERROR_CHECKSUM;
}

int pm_step_stored_begin(uint32_t sample, pm_real lr)
{
    static const void *none[PM_INPUTS];
#if PM_COMMIT
    const uint32_t counter = pm_steps;
#else
    static uint32_t counter;
#endif
    if (pm_holds != PM_HOLDS_STATE) return PM_ERROR_STATE;
    if (pm_progress.slice) return PM_ERROR_BUSY;
    if (pm_samples() == 0) return PM_ERROR_EMPTY;
    const int is_drawn = sample == PM_ANY_SAMPLE;
    if (is_drawn) sample = draw(counter, 1, pm_samples());
    if (sample >= pm_samples()) return PM_ERROR_INDEX;
    const uint32_t place = places[sample / PM_GROUP_SAMPLES];
    if (place == NO_PLACE) return PM_ERROR_CHECKSUM;
    reading.slot = PM_SLOTS + place;
    reading.offset = place_of(sample);
    PM_TRY(check_sample());
    PM_TRY(pm_step_begin(none, lr));
    for (uint32_t k = 0, at = 0; k < PM_SAMPLE_INPUTS; k++) {
        const uint32_t part = PM_SAMPLE_OUTPUTS + k;
        const int error = pm_sample_read(part, stored_inputs.bytes + at, pm_sample_parts[part] * PM_SCALE);
        if (error) {
            pm_progress.slice = 0;
            return error;
        }
        pm_progress.inputs[pm_sample_inputs[k]] = stored_inputs.bytes + at;
        at += part_bytes(part);
    }
    pm_progress.way = PM_WAY_STORED;
#if !PM_COMMIT
    counter += (uint32_t)is_drawn;
#endif
    return PM_OK;
}

int pm_step_stored(uint32_t sample, pm_real lr, pm_real *loss)
{
    PM_TRY(pm_step_stored_begin(sample, lr));
    const int error = pm_step_some(0xFFFFFFFFu);
    if (!error) *loss = pm_progress.loss;
    return error;
}

#else
typedef int pm_replay_is_not_used;
#endif
