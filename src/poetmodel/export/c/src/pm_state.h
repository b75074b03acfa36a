/* What outlives a step: where each tensor of it is. The tables are made with pm_step.c. */
#ifndef PM_STATE_H
#define PM_STATE_H

#include "pm_runtime.h"

typedef enum { PM_RAM, PM_STORAGE, PM_MAPPED_STORAGE, PM_FLASH } pm_home;
typedef enum { PM_IS_REAL, PM_IS_INT32, PM_IS_UINT8, PM_IS_INT8 } pm_type;

/* One buffer of state. Sizes and addresses are those of the build for float. */
typedef struct {
    uint32_t elements;
    uint32_t weights; /* where its first value is in pm_weights [bytes]; PM_ZEROS: zeros, which are not there */
    uint32_t address; /* where it is in the arena, or may be put between two steps [bytes] */
    uint32_t slot;    /* on storage; PM_NO_SLOT where it has none */
    uint8_t home;
    uint8_t type;
} pm_buffer_t;

/* Elements of a buffer; a tensor as users see it has one, or one for each tile. */
typedef struct {
    uint32_t buffer; /* in pm_buffers */
    uint32_t offset; /* its first element there */
    uint32_t elements;
} pm_piece_t;

/* The pieces of a state tensor. */
typedef struct {
    uint32_t first;
    uint32_t count;
} pm_pieces_t;

/* A gradient that a step without updates hands out: it may lie in another order of dimensions. */
typedef struct {
    uint32_t slot;
    uint32_t slot_elements; /* of the whole buffer */
    uint32_t offset;        /* its first element there */
    uint32_t dimensions;    /* 0 where it lies in order */
    const int32_t *sizes;
    const int32_t *strides;
} pm_gradient_t;

#define PM_NO_SLOT 0xFFFFFFFFu
#define PM_ZEROS 0xFFFFFFFFu

#ifdef PM_ARENA_EXTERN
extern unsigned char *pm_arena; /* what pm_use_arena was given */
#else
extern unsigned char pm_arena[];
#endif
extern const uint32_t pm_weights[]; /* bytes, in words: the first one lowest */
extern const pm_buffer_t pm_buffers[];
extern const pm_piece_t pm_pieces[];
extern const pm_pieces_t pm_state_pieces[];
extern const pm_gradient_t pm_gradients[];
#if PM_VOLATILE
extern const uint32_t pm_saved[]; /* the buffers of a generation, in the order of its slots */
#endif

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

/* A step that is under way, in one call or in slices. */
typedef struct {
    const void *inputs[PM_INPUTS ? PM_INPUTS : 1];
    pm_real lr;
    pm_real loss;  /* of the last step, once it was computed */
    uint32_t slice; /* what comes next; 0: no step is under way */
#if PM_REPLAY
    uint32_t way;
#endif
} pm_progress_t;

#if PM_REPLAY
/* What pm_run_nodes does: all nodes; those behind the front, on a stored sample; those of the front, to store one. */
enum { PM_WAY_WHOLE, PM_WAY_STORED, PM_WAY_KEEPS };
#define PM_STORED (pm_progress.way == PM_WAY_STORED)
#define PM_KEEPS (pm_progress.way == PM_WAY_KEEPS)
extern const uint32_t pm_sample_parts[];  /* bytes of the outputs of the front, then of inputs */
extern const uint32_t pm_sample_inputs[]; /* which inputs those are */
int pm_sample_write(uint32_t part, const void *from, uint32_t bytes); /* parts in rising order */
int pm_sample_read(uint32_t part, void *to, uint32_t bytes);
void pm_replay_clear(void);
int pm_replay_load(void);
#endif

extern pm_progress_t pm_progress;

/* Generated: runs from pm_progress.slice on, at most so many nodes; PM_MORE, or how the step has ended. */
int pm_run_nodes(uint32_t nodes);

/* Between two nodes, in pm_run_nodes: what a step can be ended and begun again at. */
#define PM_SLICE(number)             \
    if (nodes-- == 0) {              \
        pm_progress.slice = (number); \
        return PM_MORE;              \
    }                                \
    __attribute__((fallthrough));    \
    case (number)

#if PM_MIGRATES
/* Elements of a buffer that are taken over, from a tensor of the generation of another step. */
typedef struct {
    uint32_t buffer; /* in pm_buffers */
    uint32_t first;  /* its first element there */
    uint32_t count;
    uint32_t tensor; /* in pm_old_bytes */
    uint32_t offset; /* its first element there */
} pm_migrated_t;
extern const pm_migrated_t pm_migrated[];
extern const uint32_t pm_old_bytes[]; /* of the tensors of such a generation, in the build for float */
/* Puts what is taken over into elements of a buffer that have first values; nothing but in pm_migrate. */
int pm_migrated_values(uint32_t buffer, uint32_t first, uint32_t count, uint32_t size, void *to);
int pm_begin_at(uint32_t place, uint32_t steps); /* as pm_init, in a place of its choice */
#endif

#if PM_COMMIT
#if PM_BEST
int pm_copy_state(int is_restored); /* from PM_OLD to PM_NEW; to where state lives too if it is restored */
#endif
int pm_save_step(void); /* the end of a step: writes what the step has not written to PM_NEW, and commits */
#endif

#endif
