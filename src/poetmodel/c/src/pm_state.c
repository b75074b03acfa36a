/* State between steps: first values, reads and writes for all homes. */
#include "pm_state.h"

#include <string.h>

#if PM_IS_DOUBLE
/* The weights are floats; this build computes in double. */
pm_real pm_wide_weights[PM_WEIGHT_REALS ? PM_WEIGHT_REALS : 1];
#endif

uint32_t pm_holds;

#ifdef PM_ARENA_EXTERN
unsigned char *pm_arena;

int pm_use_arena(void *arena, size_t bytes)
{
    pm_holds = PM_HOLDS_NOTHING;
    const int fits = arena && bytes >= (size_t)PM_ARENA_BYTES * PM_SCALE && (uintptr_t)arena % PM_ALIGNMENT == 0;
    pm_arena = fits ? arena : 0;
    return fits ? PM_OK : PM_ERROR_ARENA;
}
#endif

/* Copies `count` first values of a buffer, from element `first` on, to RAM. */
static void load(void *to, const pm_buffer_t *buffer, uint32_t first, uint32_t count)
{
    if (buffer->weights == PM_ZEROS) {
        memset(to, 0, (size_t)count * pm_size_of(buffer->type));
    } else if (buffer->type == PM_IS_REAL) {
        memcpy(to, PM_CONSTANT_REALS(buffer->weights / 4u + first), (size_t)count * sizeof(pm_real));
    } else {
        const uint32_t size = pm_size_of(buffer->type);
        memcpy(to, PM_CONSTANT_BYTES(buffer->weights) + (size_t)first * size, (size_t)count * size);
    }
}

/* Copies first values as load does; in pm_migrate, overwrites them with state of another step. */
static int first_values(void *to, const pm_buffer_t *buffer, uint32_t first, uint32_t count)
{
    load(to, buffer, first, count);
#if PM_MIGRATES
    return pm_migrated_values((uint32_t)(buffer - pm_buffers), first, count, pm_size_of(buffer->type), to);
#else
    return PM_OK;
#endif
}

#if PM_SLOTS
/* Returns the size of a buffer on storage: that of the float build times PM_SCALE, for every type. */
static uint32_t bytes_on_storage(const pm_buffer_t *buffer)
{
    return buffer->elements * (buffer->type == PM_IS_REAL ? 4u : pm_size_of(buffer->type)) * PM_SCALE;
}

/* Pages a buffer in, to its offset between two steps. */
static int fetch(const pm_buffer_t *buffer)
{
    PM_TRY_PAGE(pm_page_in(pm_old_slot(buffer), PM_ADDRESS(buffer->address), bytes_on_storage(buffer)));
    PM_TRY_PAGE(pm_page_wait(pm_old_slot(buffer)));
    return PM_OK;
}

static int put(const pm_buffer_t *buffer)
{
    PM_TRY_PAGE(pm_page_out(pm_new_slot(buffer), PM_ADDRESS(buffer->address), bytes_on_storage(buffer)));
    PM_TRY_PAGE(pm_page_wait(pm_new_slot(buffer)));
    return PM_OK;
}
#endif

/* A change of state: `count` elements of tensor `index`, from `first` on, get the values at `from`; if `from` is 0, all
   state gets its first values. */
typedef struct {
    const unsigned char *from;
    int index;
    uint32_t first, count;
} change_t;

static uint32_t most(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Copies the changed elements among `count` elements of a buffer, from `first` on, to `to`, unless that is 0. Returns
   whether any of them change: none do if what->from is 0. */
static int change(const change_t *what, const pm_buffer_t *buffer, uint32_t first, uint32_t count, void *to)
{
    const pm_pieces_t *pieces = &pm_state_pieces[what->index];
    const uint32_t size = pm_size_of(buffer->type);
    uint32_t begin = 0; /* first element of a piece in the tensor */
    int any = 0;
    for (uint32_t k = 0; k < pieces->count && what->from; k++) {
        const pm_piece_t *piece = &pm_pieces[pieces->first + k];
        /* Changed elements in the piece, then in the buffer. */
        const uint32_t from = most(what->first, begin) - begin;
        const uint32_t until = most(least(what->first + what->count, begin + piece->elements), begin) - begin;
        const uint32_t low = most(piece->offset + from, first);
        const uint32_t high = least(piece->offset + until, first + count);
        if (&pm_buffers[piece->buffer] == buffer && from < until && low < high) {
            const uint32_t source = begin + low - piece->offset - what->first;
            any = 1;
            if (to) {
                memcpy((unsigned char *)to + (size_t)(low - first) * size, what->from + (size_t)source * size,
                       (size_t)(high - low) * size);
            }
        }
        begin += piece->elements;
    }
    return any;
}

#if PM_SLOTS && PM_MAPPED
int pm_check_addresses(void)
{
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        if (pm_buffers[k].home == PM_MAPPED_STORAGE && !pm_page_address(pm_old_slot(&pm_buffers[k]))) {
            return PM_ERROR_PAGE;
        }
    }
    return PM_OK;
}

/* Writes first values, or changed elements, of a buffer on memory-mapped storage, in pieces; with changed elements, all
   elements if each commit writes the buffer. */
static int write_mapped(const pm_buffer_t *buffer, const change_t *what)
{
    pm_real some[32];
    const int whole = pm_is_committed(buffer) || !what->from;
    const uint32_t size = pm_size_of(buffer->type);
    for (uint32_t first = 0; first < buffer->elements; first += 32u) {
        const uint32_t count = least(buffer->elements - first, 32u);
        if (what->from) {
            const unsigned char *old = pm_page_address(pm_old_slot(buffer));
            if (!old) {
                return PM_ERROR_PAGE;
            }
            memcpy(some, old + (size_t)first * size, (size_t)count * size);
        } else {
            PM_TRY(first_values(some, buffer, first, count));
        }
        if (change(what, buffer, first, count, some) || whole) {
            PM_TRY_PAGE(pm_page_write(pm_new_slot(buffer), first * size, some, count * size));
        }
    }
    return PM_OK;
}
#endif

/* Writes first values, or changed elements, of a buffer to its home and to storage. */
static int write_buffer(const pm_buffer_t *buffer, const change_t *what)
{
    void *const place = PM_ADDRESS(buffer->address);
#if PM_SLOTS && PM_MAPPED
    if (buffer->home == PM_MAPPED_STORAGE) {
        return write_mapped(buffer, what);
    }
#endif
    if (!what->from) {
        PM_TRY(first_values(place, buffer, 0, buffer->elements));
    }
#if PM_SLOTS
    if (what->from && buffer->home == PM_STORAGE) {
        PM_TRY(fetch(buffer));
    }
#endif
    (void)change(what, buffer, 0, buffer->elements, place);
#if PM_SLOTS
    if (buffer->slot != PM_NO_SLOT) {
        return put(buffer);
    }
#endif
    return PM_OK;
}

#if PM_VOLATILE
/* Copies all replaced state to the next generation. */
static int put_all(void)
{
    for (uint32_t row = 1; row + 1u < PM_STATE_SLOTS; row++) {
        const pm_buffer_t *buffer = &pm_buffers[pm_saved[row - 1u]];
        const uint32_t slot = PM_NEW(PM_PAGE_SLOTS + row);
        const void *from = PM_ADDRESS(buffer->address);
        if (buffer->home == PM_STORAGE) {
            PM_TRY(fetch(buffer));
        }
#if PM_MAPPED
        if (buffer->home == PM_MAPPED_STORAGE) {
            from = pm_page_address(buffer->slot);
            if (!from) {
                return PM_ERROR_PAGE;
            }
        }
#endif
        PM_TRY_PAGE(pm_page_out(slot, from, bytes_on_storage(buffer)));
        PM_TRY_PAGE(pm_page_wait(slot));
    }
    return PM_OK;
}

/* Copies all replaced state from the complete generation to its home; mapped storage is volatile memory here. */
static int fetch_all(void)
{
    for (uint32_t row = 1; row + 1u < PM_STATE_SLOTS; row++) {
        const pm_buffer_t *buffer = &pm_buffers[pm_saved[row - 1u]];
        const uint32_t slot = PM_OLD(PM_PAGE_SLOTS + row);
        void *to = PM_ADDRESS(buffer->address);
#if PM_MAPPED
        if (buffer->home == PM_MAPPED_STORAGE) {
            to = (void *)(uintptr_t)pm_page_address(buffer->slot);
            if (!to) {
                return PM_ERROR_PAGE;
            }
        }
#endif
        PM_TRY_PAGE(pm_page_in(slot, to, bytes_on_storage(buffer)));
        PM_TRY_PAGE(pm_page_wait(slot));
        if (buffer->home == PM_STORAGE) {
            PM_TRY(put(buffer));
        }
    }
    return PM_OK;
}
#endif

/* Writes first values or changed elements of state to its home. If committed state changes, writes all of it as the
   next generation. */
static int write_state(const change_t *what)
{
    int commits = PM_COMMIT && !what->from;
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        const pm_buffer_t *buffer = &pm_buffers[k];
        const int changes = buffer->home != PM_FLASH && !what->from;
        if (changes || change(what, buffer, 0, buffer->elements, 0)) {
#if PM_COMMIT
            if (pm_is_committed(buffer)) {
                commits = 1;
                continue;
            }
#endif
            PM_TRY(write_buffer(buffer, what));
            commits |= PM_VOLATILE;
        }
    }
#if PM_COMMIT
    PM_TRY(commits ? pm_commit_begin(0) : PM_OK);
#endif
#if PM_VOLATILE
    PM_TRY(commits ? put_all() : PM_OK);
#elif PM_COMMIT
    for (uint32_t slot = PM_PAGE_SLOTS + 1u; commits && slot + 1u < PM_PAGE_SLOTS + PM_STATE_SLOTS; slot++) {
        for (uint32_t k = 0; k < PM_BUFFERS; k++) {
            if (pm_buffers[k].slot == slot) {
                PM_TRY(write_buffer(&pm_buffers[k], what));
            }
        }
    }
#endif
#if PM_COMMIT
    return commits ? pm_commit() : PM_OK;
#else
    (void)commits;
    return PM_OK;
#endif
}

/* Converts constants to double if reals are double. */
static void widen(void)
{
#if PM_IS_DOUBLE
    const uint32_t reals = PM_WEIGHT_REALS; /* may be 0 */
    for (uint32_t k = 0; k < reals; k++) {
        float value;
        memcpy(&value, &pm_weights[k], sizeof value);
        pm_wide_weights[k] = (pm_real)value;
    }
#endif
}

/* Prepares pm_init and pm_resume: invalidates state, checks the arena, cancels a step in progress, widens constants. */
static int prepare(void)
{
    pm_holds = PM_HOLDS_NOTHING;
#ifdef PM_ARENA_EXTERN
    if (!pm_arena) {
        return PM_ERROR_ARENA;
    }
#endif
    pm_progress.slice = 0; /* cancels a step in progress */
    widen();
    return PM_OK;
}

/* Writes the first values of all state. */
static int write_first_state(void)
{
    static const change_t all = {0, 0, 0, 0};
    PM_TRY(write_state(&all));
#if PM_RANDOM && !PM_COMMIT
    pm_random_step = 0;
#endif
#if PM_REPLAY
    pm_replay_clear();
#endif
    pm_holds = PM_HOLDS_STATE;
    return PM_OK;
}

int pm_init(void)
{
    PM_TRY(prepare());
#ifdef PM_POISON
    memset(pm_arena, 0xFF, (size_t)PM_ARENA_BYTES * PM_SCALE);
#endif
#if PM_COMMIT
    PM_TRY(pm_commit_clear());
#endif
    return write_first_state();
}

#if PM_MIGRATES
int pm_begin_at(uint32_t place, const pm_migrated_state_t *from)
{
    PM_TRY(prepare());
    PM_TRY(pm_commit_clear_at(place, from->steps, most(from->number, from->run)));
#if PM_TAKES_SAMPLES
    const int error = pm_replay_take(from->run, pm_numbers[1], from->ranges);
    if (error == PM_ERROR_SLOT) {
        pm_numbers[1]++; /* no sample belongs to this run */
    } else if (error) {
        return error;
    }
#endif
    PM_TRY(write_first_state());
#if PM_TAKES_SAMPLES
    pm_holds = PM_HOLDS_NOTHING;
    PM_TRY(pm_replay_load());
    pm_holds = PM_HOLDS_STATE;
#endif
    return PM_OK;
}
#endif

#if PM_COMMIT
int pm_load_state(void)
{
    PM_TRY(prepare());
#if PM_VOLATILE
    static const change_t all = {0, 0, 0, 0};
    for (uint32_t k = 0; k < PM_BUFFERS; k++) { /* constant state is in no generation */
        if (pm_buffers[k].home != PM_FLASH) {
            PM_TRY(write_buffer(&pm_buffers[k], &all));
        }
    }
    PM_TRY(fetch_all());
#else
#if PM_STATE_SUMS
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        if (pm_buffers[k].home == PM_STORAGE && pm_is_committed(&pm_buffers[k])) {
            PM_TRY(fetch(&pm_buffers[k]));
        }
#if PM_MAPPED
        if (pm_buffers[k].home == PM_MAPPED_STORAGE) {
            PM_TRY_PAGE(pm_page_check(pm_old_slot(&pm_buffers[k])));
        }
#endif
    }
#endif
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        if (pm_buffers[k].home == PM_RAM) {
            PM_TRY(fetch(&pm_buffers[k]));
        }
    }
#endif
#if PM_REPLAY
    PM_TRY(pm_replay_load());
#endif
    pm_holds = PM_HOLDS_STATE;
    return PM_OK;
}

/* Writes to the next generation the state that the step has not written there: state with its home in RAM, or all state
   if storage is volatile. Begins the generation, unless the step has. */
static int put_rest(uint32_t steps)
{
    PM_TRY(PM_WRITES_EARLY ? PM_OK : pm_commit_begin(steps));
#if PM_VOLATILE
    PM_TRY(put_all());
#endif
    for (uint32_t k = 0; k < PM_BUFFERS; k++) { /* these are last in a generation, in the same order */
        if (pm_buffers[k].home == PM_RAM && pm_is_committed(&pm_buffers[k])) {
            PM_TRY(put(&pm_buffers[k]));
        }
    }
    return PM_OK;
}

#if PM_BEST
int pm_copy_state(int is_restored)
{
#if PM_VOLATILE
    PM_TRY(is_restored ? fetch_all() : PM_OK);
    return put_all();
#else
    static const unsigned char nothing;
    static const change_t none = {&nothing, 0, 0, 0};
    for (uint32_t slot = PM_PAGE_SLOTS + 1u; slot + 1u < PM_PAGE_SLOTS + PM_STATE_SLOTS; slot++) {
        for (uint32_t k = 0; k < PM_BUFFERS; k++) {
            if (pm_buffers[k].slot != slot) {
                continue;
            }
            if (is_restored && pm_buffers[k].home == PM_RAM) {
                PM_TRY(fetch(&pm_buffers[k]));
            }
#if PM_MAPPED && PM_STATE_SUMS
            if (pm_buffers[k].home == PM_MAPPED_STORAGE) {
                PM_TRY_PAGE(pm_page_check(pm_old_slot(&pm_buffers[k])));
            }
#endif
            PM_TRY(write_buffer(&pm_buffers[k], &none));
        }
    }
    return PM_OK;
#endif
}
#endif

int pm_save_step(void)
{
    if ((pm_steps + 1u) % PM_COMMIT_EVERY) {
        pm_steps++;
        return PM_OK;
    }
    PM_TRY(put_rest(1));
    return pm_commit();
}

int pm_commit_now(void)
{
    if (pm_holds != PM_HOLDS_STATE) {
        return PM_ERROR_STATE;
    }
    if (pm_progress.slice) {
        return PM_ERROR_BUSY;
    }
    if (pm_steps % PM_COMMIT_EVERY == 0) {
        return PM_OK; /* the last step has committed */
    }
    PM_TRY(put_rest(0));
    return pm_commit();
}
#endif

/* -- access by the application ------------------------------------------------------------------ */

static int read_buffer(const pm_buffer_t *buffer, uint32_t first, uint32_t count, void *to)
{
    const uint32_t size = pm_size_of(buffer->type);
    const unsigned char *from = PM_ADDRESS(buffer->address);
    if (buffer->home == PM_FLASH) {
        load(to, buffer, first, count);
        return PM_OK;
    }
#if PM_SLOTS
    if (buffer->home == PM_STORAGE) {
        PM_TRY(fetch(buffer));
    }
#endif
#if PM_SLOTS && PM_MAPPED
    if (buffer->home == PM_MAPPED_STORAGE) {
        from = pm_page_address(pm_old_slot(buffer));
        if (!from) {
            return PM_ERROR_PAGE;
        }
    }
#endif
    memcpy(to, from + (size_t)first * size, (size_t)count * size);
    return PM_OK;
}

/* Returns the error if elements cannot be read or written, otherwise PM_OK. */
static int refused(int index, uint32_t first, uint32_t count)
{
    if (index < 0 || index >= PM_STATES || first > pm_states_info[index].elements ||
        count > pm_states_info[index].elements - first) {
        return PM_ERROR_INDEX;
    }
    if (pm_holds == PM_HOLDS_NOTHING) {
        return PM_ERROR_STATE;
    }
    return pm_progress.slice ? PM_ERROR_BUSY : PM_OK; /* state may be mixed, and its memory may be in use */
}

int pm_read_state_part(int index, uint32_t first, uint32_t count, pm_real *to)
{
    PM_TRY(refused(index, first, count));
    const pm_pieces_t *pieces = &pm_state_pieces[index];
    uint32_t begin_of_piece = 0;
    uint32_t done = 0;
    for (uint32_t k = 0; k < pieces->count && done < count; k++) {
        const pm_piece_t *piece = &pm_pieces[pieces->first + k];
        const pm_buffer_t *buffer = &pm_buffers[piece->buffer];
        const uint32_t at = first + done;
        if (at < begin_of_piece + piece->elements) {
            const uint32_t inside = at - begin_of_piece;
            const uint32_t some = least(count - done, piece->elements - inside);
            unsigned char *const next = (unsigned char *)to + (size_t)done * pm_size_of(buffer->type);
            PM_TRY(read_buffer(buffer, piece->offset + inside, some, next));
            done += some;
        }
        begin_of_piece += piece->elements;
    }
    return PM_OK;
}

int pm_write_state_part(int index, uint32_t first, uint32_t count, const pm_real *from)
{
    PM_TRY(refused(index, first, count));
    if (pm_holds == PM_HOLDS_TORN) {
        return PM_ERROR_STATE;
    }
    const change_t what = {(const unsigned char *)from, index, first, count};
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        const uint8_t home = pm_buffers[k].home;
        const int is_kept = PM_COMMIT && !PM_VOLATILE && !pm_is_committed(&pm_buffers[k]);
        const int stays = home == PM_FLASH || (is_kept && home == PM_MAPPED_STORAGE);
        if (stays && change(&what, &pm_buffers[k], 0, pm_buffers[k].elements, 0)) {
            return PM_READ_ONLY;
        }
    }
    return write_state(&what);
}

static uint32_t elements_of(int index)
{
    return index >= 0 && index < PM_STATES ? pm_states_info[index].elements : 0;
}

int pm_read_state(int index, pm_real *to)
{
    return pm_read_state_part(index, 0, elements_of(index), to);
}

int pm_write_state(int index, const pm_real *from)
{
    return pm_write_state_part(index, 0, elements_of(index), from);
}

/* -- gradients of a step without updates ------------------------------------------------------ */

#if PM_GRADIENTS
int pm_read_gradient_part(int index, uint32_t first, uint32_t count, pm_real *to)
{
    if (index < 0 || index >= PM_GRADIENTS || first > pm_gradients_info[index].elements ||
        count > pm_gradients_info[index].elements - first) {
        return PM_ERROR_INDEX;
    }
    if (pm_holds == PM_HOLDS_NOTHING) {
        return PM_ERROR_STATE;
    }
    if (pm_progress.slice) {
        return PM_ERROR_BUSY;
    }
    const pm_gradient_t *gradient = &pm_gradients[index];
    PM_TRY_PAGE(pm_page_in(gradient->slot, pm_arena, gradient->slot_elements * 4u * PM_SCALE));
    PM_TRY_PAGE(pm_page_wait(gradient->slot));
    const pm_real *from = PM_REALS(0);
    for (uint32_t k = 0; k < count; k++) {
        uint32_t at = gradient->offset;
        uint32_t rest = first + k;
        if (gradient->dimensions == 0) {
            at += rest;
        }
        for (uint32_t d = gradient->dimensions; d-- > 0;) {
            at += rest % (uint32_t)gradient->sizes[d] * (uint32_t)gradient->strides[d];
            rest /= (uint32_t)gradient->sizes[d];
        }
        to[k] = from[at];
    }
    return PM_OK;
}

int pm_read_gradient(int index, pm_real *to)
{
    const int known = index >= 0 && index < PM_GRADIENTS;
    return pm_read_gradient_part(index, 0, known ? pm_gradients_info[index].elements : 0, to);
}
#endif
