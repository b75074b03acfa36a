/* State between steps: its first values, and how it is read and written wherever its home is. */
#include "pm_state.h"

#include <string.h>

#if PM_IS_DOUBLE
/* The weights are floats; this build computes in double. */
pm_real pm_wide_weights[PM_WEIGHT_REALS ? PM_WEIGHT_REALS : 1];
#endif

#ifdef PM_ARENA_EXTERN
unsigned char *pm_arena;

int pm_use_arena(void *arena, size_t bytes)
{
    const int fits = arena && bytes >= (size_t)PM_ARENA_BYTES * PM_SCALE && (uintptr_t)arena % PM_ALIGNMENT == 0;
    pm_arena = fits ? arena : 0;
    return fits ? PM_OK : PM_ERROR_ARENA;
}
#endif

static uint32_t size_of(uint8_t type)
{
    return type == PM_IS_REAL ? (uint32_t)sizeof(pm_real) : type == PM_IS_INT32 ? 4u : 1u;
}

/* Copies first values to RAM. */
static void load(void *to, const pm_buffer_t *buffer, uint32_t first, uint32_t count)
{
    if (buffer->type == PM_IS_REAL) {
        memcpy(to, PM_CONSTANT_REALS(buffer->weights / 4u + first), (size_t)count * sizeof(pm_real));
    } else {
        const uint32_t size = size_of(buffer->type);
        memcpy(to, PM_CONSTANT_BYTES(buffer->weights) + (size_t)first * size, (size_t)count * size);
    }
}

#if PM_SLOTS
/* Bytes of a buffer on storage, the same for every type: what the float build has, times PM_SCALE. */
static uint32_t bytes_on_storage(const pm_buffer_t *buffer)
{
    return buffer->elements * (buffer->type == PM_IS_UINT8 ? 1u : 4u) * PM_SCALE;
}

/* Pages a buffer in, into the room that it has between two steps. */
static int fetch(const pm_buffer_t *buffer)
{
    PM_TRY(pm_page_in(PM_OLD(buffer->slot), PM_ADDRESS(buffer->address), bytes_on_storage(buffer)));
    return pm_page_wait(PM_OLD(buffer->slot));
}

static int put(const pm_buffer_t *buffer, uint32_t slot)
{
    PM_TRY(pm_page_out(slot, PM_ADDRESS(buffer->address), bytes_on_storage(buffer)));
    return pm_page_wait(slot);
}
#endif

#if PM_SLOTS && PM_MAPPED
/* Writes first values to storage that the core reads where it lies. */
static int write_mapped(const pm_buffer_t *buffer, uint32_t slot)
{
    pm_real some[32];
    const uint32_t size = size_of(buffer->type);
    for (uint32_t first = 0; first < buffer->elements; first += 32u) {
        const uint32_t count = buffer->elements - first < 32u ? buffer->elements - first : 32u;
        load(some, buffer, first, count);
        PM_TRY(pm_page_write(slot, first * size, some, count * size));
    }
    return PM_OK;
}
#endif

/* Gives a buffer its first values, on storage in both generations where there are two. */
static int begin(const pm_buffer_t *buffer)
{
    if (buffer->home == PM_RAM || buffer->home == PM_STORAGE) {
        load(PM_ADDRESS(buffer->address), buffer, 0, buffer->elements);
    }
#if PM_SLOTS
    if (buffer->slot == PM_NO_SLOT) {
        return PM_OK;
    }
#if PM_MAPPED
    if (buffer->home == PM_MAPPED_STORAGE) {
        PM_TRY(write_mapped(buffer, PM_OLD(buffer->slot)));
#if PM_COMMIT
        PM_TRY(write_mapped(buffer, PM_NEW(buffer->slot)));
#endif
        return PM_OK;
    }
#endif
#if PM_COMMIT
    PM_TRY(put(buffer, PM_NEW(buffer->slot)));
#endif
    PM_TRY(put(buffer, PM_OLD(buffer->slot)));
#endif
    return PM_OK;
}

/* Constants as doubles, where those are the reals. */
static void widen(void)
{
#if PM_IS_DOUBLE
    for (uint32_t k = 0; k < PM_WEIGHT_REALS; k++) {
        float value;
        memcpy(&value, &pm_weights[k], sizeof value);
        pm_wide_weights[k] = (pm_real)value;
    }
#endif
}

/* What pm_init and pm_resume begin with. */
static int prepare(void)
{
#ifdef PM_ARENA_EXTERN
    if (!pm_arena) {
        return PM_ERROR_ARENA;
    }
#endif
    pm_progress.slice = 0; /* a step that was under way is none any more */
    widen();
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
    /* What lies in RAM for ever comes last: its room may be that of nothing else. */
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        if (pm_buffers[k].home != PM_RAM) {
            PM_TRY(begin(&pm_buffers[k]));
        }
    }
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        if (pm_buffers[k].home == PM_RAM) {
            PM_TRY(begin(&pm_buffers[k]));
        }
    }
#if PM_COMMIT
    return pm_commit();
#else
    return PM_OK;
#endif
}

#if PM_COMMIT
int pm_load_resident(void)
{
    PM_TRY(prepare());
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        if (pm_buffers[k].home == PM_RAM) {
            PM_TRY(fetch(&pm_buffers[k]));
        }
    }
    return PM_OK;
}

int pm_save_resident(void)
{
    for (uint32_t k = 0; k < PM_BUFFERS; k++) {
        if (pm_buffers[k].home == PM_RAM) {
            PM_TRY(put(&pm_buffers[k], PM_NEW(pm_buffers[k].slot)));
        }
    }
    return PM_OK;
}
#endif

/* -- as users see it ------------------------------------------------------------------------- */

static int read_buffer(const pm_buffer_t *buffer, uint32_t first, uint32_t count, void *to)
{
    const uint32_t size = size_of(buffer->type);
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
        from = pm_page_address(PM_OLD(buffer->slot));
    }
#endif
    memcpy(to, from + (size_t)first * size, (size_t)count * size);
    return PM_OK;
}

static int write_buffer(const pm_buffer_t *buffer, uint32_t first, uint32_t count, const void *from)
{
    const uint32_t size = size_of(buffer->type);
    unsigned char *to = PM_ADDRESS(buffer->address);
    if (buffer->home == PM_FLASH) {
        return PM_READ_ONLY;
    }
#if PM_SLOTS && PM_MAPPED
    if (buffer->home == PM_MAPPED_STORAGE) {
        return pm_page_write(PM_OLD(buffer->slot), first * size, from, count * size);
    }
#endif
#if PM_SLOTS
    if (buffer->home == PM_STORAGE) {
        PM_TRY(fetch(buffer));
    }
#endif
    memcpy(to + (size_t)first * size, from, (size_t)count * size);
#if PM_SLOTS
    if (buffer->slot != PM_NO_SLOT) {
        return put(buffer, PM_OLD(buffer->slot));
    }
#endif
    return PM_OK;
}

/* Reads to `to` or writes from `from`, whichever is there, piece by piece. */
static int move(int index, uint32_t first, uint32_t count, unsigned char *to, const unsigned char *from)
{
    if (index < 0 || index >= PM_STATES || first > pm_states_info[index].elements ||
        count > pm_states_info[index].elements - first) {
        return PM_ERROR_INDEX;
    }
    if (pm_progress.slice) {
        return PM_ERROR_BUSY; /* the state is that of no step, and its room may be used */
    }
    const pm_pieces_t *pieces = &pm_state_pieces[index];
    uint32_t begin_of_piece = 0;
    uint32_t done = 0;
    for (uint32_t k = 0; k < pieces->count && done < count; k++) {
        const pm_piece_t *piece = &pm_pieces[pieces->first + k];
        const uint32_t size = size_of(pm_buffers[piece->buffer].type);
        const uint32_t at = first + done;
        if (at < begin_of_piece + piece->elements) {
            const uint32_t inside = at - begin_of_piece;
            const uint32_t left = piece->elements - inside;
            const uint32_t some = count - done < left ? count - done : left;
            const pm_buffer_t *buffer = &pm_buffers[piece->buffer];
            if (to) {
                PM_TRY(read_buffer(buffer, piece->offset + inside, some, to + (size_t)done * size));
            } else {
                PM_TRY(write_buffer(buffer, piece->offset + inside, some, from + (size_t)done * size));
            }
            done += some;
        }
        begin_of_piece += piece->elements;
    }
    return PM_OK;
}

int pm_read_state_part(int index, uint32_t first, uint32_t count, pm_real *to)
{
    return move(index, first, count, (unsigned char *)to, 0);
}

int pm_write_state_part(int index, uint32_t first, uint32_t count, const pm_real *from)
{
    return move(index, first, count, 0, (const unsigned char *)from);
}

static uint32_t elements_of(int index)
{
    return index >= 0 && index < PM_STATES ? pm_states_info[index].elements : 0;
}

int pm_read_state(int index, pm_real *to)
{
    return move(index, 0, elements_of(index), (unsigned char *)to, 0);
}

int pm_write_state(int index, const pm_real *from)
{
    return move(index, 0, elements_of(index), 0, (const unsigned char *)from);
}

/* -- gradients of a step without updates ------------------------------------------------------ */

#if PM_GRADIENTS
int pm_read_gradient_part(int index, uint32_t first, uint32_t count, pm_real *to)
{
    if (index < 0 || index >= PM_GRADIENTS || first > pm_gradients_info[index].elements ||
        count > pm_gradients_info[index].elements - first) {
        return PM_ERROR_INDEX;
    }
    if (pm_progress.slice) {
        return PM_ERROR_BUSY;
    }
    const pm_gradient_t *gradient = &pm_gradients[index];
    PM_TRY(pm_page_in(gradient->slot, pm_arena, gradient->slot_elements * 4u * PM_SCALE));
    PM_TRY(pm_page_wait(gradient->slot));
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
