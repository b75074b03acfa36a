/* State tensors: their buffers, homes and slots. The tables are in pm_step.c. */
#ifndef PM_STATE_H
#define PM_STATE_H

#include "pm_runtime.h"

typedef enum { PM_RAM, PM_STORAGE, PM_MAPPED_STORAGE, PM_FLASH } pm_home;
typedef enum { PM_IS_REAL, PM_IS_INT32, PM_IS_UINT8, PM_IS_INT8 } pm_type;

/* One buffer of state. Sizes and addresses are those of the build for float. */
typedef struct {
    uint32_t elements;
    uint32_t weights; /* offset of its first values in pm_weights [bytes]; PM_ZEROS: all zeros, not stored */
    uint32_t address; /* offset in the arena; for state on storage, one that is free between two steps [bytes] */
    uint32_t slot;    /* slot on storage, or PM_NO_SLOT */
    uint8_t home;
    uint8_t type;
} pm_buffer_t;

/* Elements of a buffer. A state tensor has one piece, or one for each tile. */
typedef struct {
    uint32_t buffer; /* index in pm_buffers */
    uint32_t offset; /* first element of the piece in the buffer */
    uint32_t elements;
} pm_piece_t;

/* The pieces of a state tensor: consecutive ones of pm_pieces. */
typedef struct {
    uint32_t first;
    uint32_t count;
} pm_pieces_t;

/* A gradient that a step without updates returns; its dimensions may be in another order. */
typedef struct {
    uint32_t slot;
    uint32_t slot_elements; /* elements of the whole buffer */
    uint32_t offset;        /* first element of the gradient in the buffer */
    uint32_t dimensions;    /* 0 if it is contiguous */
    const int32_t *sizes;
    const int32_t *strides;
} pm_gradient_t;

#define PM_NO_SLOT 0xFFFFFFFFu
#define PM_ZEROS 0xFFFFFFFFu

#ifdef PM_ARENA_EXTERN
extern unsigned char *pm_arena; /* memory from pm_use_arena */
#else
extern unsigned char pm_arena[];
#endif
extern const uint32_t pm_weights[]; /* bytes in little-endian words */
extern const pm_buffer_t pm_buffers[];
extern const pm_piece_t pm_pieces[];
extern const pm_pieces_t pm_state_pieces[];
extern const pm_gradient_t pm_gradients[];
#if PM_VOLATILE
extern const uint32_t pm_saved[]; /* the buffers of a generation, in the order of its slots */
#endif

/* Returns the size of an element [bytes]. */
static inline uint32_t pm_size_of(uint8_t type)
{
    return type == PM_IS_REAL ? (uint32_t)sizeof(pm_real) : type == PM_IS_INT32 ? 4u : 1u;
}

/* Returns whether each commit writes a buffer. Other buffers have one slot in separate erase blocks, or none. */
static inline int pm_is_committed(const pm_buffer_t *buffer)
{
    return PM_COMMIT && buffer->slot + 1u > PM_PAGE_SLOTS; /* PM_NO_SLOT is the highest number */
}

static inline uint32_t pm_old_slot(const pm_buffer_t *buffer)
{
    return pm_is_committed(buffer) ? PM_OLD(buffer->slot) : buffer->slot;
}

static inline uint32_t pm_new_slot(const pm_buffer_t *buffer)
{
    return pm_is_committed(buffer) ? PM_NEW(buffer->slot) : buffer->slot;
}

#define PM_ADDRESS(offset) ((void *)(pm_arena + (size_t)(offset) * PM_SCALE))
#define PM_REALS(offset) ((pm_real *)PM_ADDRESS(offset))
#define PM_INTS(offset) ((int32_t *)PM_ADDRESS(offset))
#define PM_BYTES(offset) ((uint8_t *)PM_ADDRESS(offset))
#define PM_INT8S(offset) ((int8_t *)PM_ADDRESS(offset))

#if PM_IS_DOUBLE
extern pm_real pm_wide_weights[]; /* the weights are floats */
#define PM_CONSTANT_REALS(element) ((const pm_real *)pm_wide_weights + (element))
#else
#define PM_CONSTANT_REALS(element) ((const pm_real *)(const void *)pm_weights + (element))
#endif
#define PM_CONSTANT_INTS(element) ((const int32_t *)(const void *)pm_weights + (element))
#define PM_CONSTANT_BYTES(element) ((const uint8_t *)(const void *)pm_weights + (element))
#define PM_CONSTANT_INT8S(element) ((const int8_t *)(const void *)pm_weights + (element))

/* The step in progress, in one call or in slices. */
typedef struct {
    const void *inputs[PM_INPUTS ? PM_INPUTS : 1];
    pm_real lr;
    pm_real loss;  /* of the last step with a finite loss */
    uint32_t slice; /* the next slice; 0: no step is in progress */
#if PM_REPLAY
    uint32_t way;
    int is_checked; /* pm_run_nodes(0) only checks the inputs */
#endif
} pm_progress_t;

#if PM_REPLAY
/* The nodes that pm_run_nodes executes: all nodes; those after the front, on a stored sample; those of the front, to
   store a sample. */
enum { PM_WAY_WHOLE, PM_WAY_STORED, PM_WAY_KEEPS };
#define PM_STORED (pm_progress.way == PM_WAY_STORED)
#define PM_KEEPS (pm_progress.way == PM_WAY_KEEPS)
#define PM_CHECKS pm_progress.is_checked
extern const uint32_t pm_sample_parts[];  /* sizes of the tensors of a sample: outputs of the front, then inputs */
extern const uint32_t pm_sample_inputs[]; /* indices of these inputs */
int pm_sample_write(uint32_t part, const void *from, uint32_t bytes); /* call for parts 0, 1, ... in order */
int pm_sample_read(uint32_t part, void *to, uint32_t bytes);
void pm_replay_clear(void);
int pm_replay_load(void);
int pm_replay_highest_run(uint32_t *run); /* of all groups of samples, also of other programs */
#if PM_TAKES_SAMPLES
/* Makes samples of the run `from` of another step belong to the run `to`, too, and writes no bytes of the ranges: begins
   and ends. Returns PM_ERROR_SLOT if storage has no space for both: then some belong to the new run. */
int pm_replay_take(uint32_t from, uint32_t to, const uint32_t ranges[2][2]);
#endif
#endif

extern pm_progress_t pm_progress;

/* Returns PM_ERROR_PAGE unless memory-mapped storage has an address for all state there: calls read it unchecked. */
int pm_check_addresses(void);

#if PM_MAPPED
/* An update of state on memory-mapped storage, part by part. Its table: rows, units in each, the most of them in a part,
   elements of a unit, elements in a write, turns, number of written pieces, number of pieces, and these (of pm_pieces). */
typedef struct {
    const int32_t *table;
    pm_real *copies;       /* of a part of each piece, on the stack: the elements of a write apart */
    int32_t row, first, n; /* the part: n units of a row, from `first` on */
    int32_t held;          /* elements in the copies before those of the part */
    int32_t at;            /* written elements of the turn */
    int32_t turn;
    int error;
} pm_mapped_t;

/* Writes the part that the step has changed in its copies, then copies the next one; returns whether there is one. */
int pm_mapped_next(pm_mapped_t *update);
#endif

/* Generated: executes at most `nodes` nodes from pm_progress.slice on; returns PM_MORE, or the result of the step. */
int pm_run_nodes(uint32_t nodes);

/* A label between two nodes in pm_run_nodes, at which a step can pause and continue. */
#define PM_SLICE(number)             \
    if (nodes-- == 0) {              \
        pm_progress.slice = (number); \
        return PM_MORE;              \
    }                                \
    __attribute__((fallthrough));    \
    case (number)

#if PM_MIGRATES
/* Elements of a buffer that are copied from a tensor in the generation of another step. */
typedef struct {
    uint32_t buffer; /* index in pm_buffers */
    uint32_t first;  /* first copied element in the buffer */
    uint32_t count;
    uint32_t tensor; /* index in pm_old_bytes */
    uint32_t offset; /* first copied element in the tensor */
} pm_migrated_t;
extern const pm_migrated_t pm_migrated[];
extern const uint32_t pm_old_bytes[]; /* sizes of the tensors of that generation, in the build for float [bytes] */
/* Overwrites those of `count` elements at `to` that have copied state of the other step: elements of a buffer from
   `first` on, of `size` bytes each. Does nothing outside of pm_migrate. */
int pm_migrated_values(uint32_t buffer, uint32_t first, uint32_t count, uint32_t size, void *to);
/* The generation of the other step, and the ranges of erase blocks of this generation and the new one. */
typedef struct {
    uint32_t number, run, steps;
    uint32_t ranges[2][2];
} pm_migrated_state_t;
int pm_begin_at(uint32_t place, const pm_migrated_state_t *from); /* as pm_init, with the place of the next generation */
#endif

#if PM_COMMIT
#if PM_BEST
int pm_copy_state(int is_restored); /* from PM_OLD to PM_NEW; if restored, also to the homes of state */
#endif
int pm_save_step(void); /* ends a step: counts it, or commits it with all state that the step has not written */
#endif

#endif
