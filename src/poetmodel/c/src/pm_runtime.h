/* Declarations that the generated code and the handwritten code share. */
#ifndef PM_RUNTIME_H
#define PM_RUNTIME_H

#include <string.h>

/* pm.h defines PM_INPUTS, PM_STATES, PM_NODES, PM_GRADIENTS (0 with an optimizer), PM_INPUT_BYTES (of all inputs,
   each in whole words), PM_OUTPUTS (elements that pm_infer writes; 0 without pm_infer), PM_SLOTS (all slots, with all
   generations), PM_PAGE_SLOTS (slots in separate erase blocks, the first ones), PM_STATE_SLOTS (slots of a generation),
   PM_GENERATIONS, PM_COMMIT (0 or 1), PM_COMMIT_EVERY, PM_STATE_SUMS (0 or 1: committed state has checksums), PM_MAPPED
   (0 or 1: the core reads storage like RAM), PM_VOLATILE (0 or 1: storage loses its content without power, so that
   commits write flash), PM_WRITES_EARLY (0 or 1: a step writes state to storage before its end), PM_RANDOM (0 or 1: a
   step draws random numbers), PM_STEP_ID (a hash of the computation), PM_LAYOUT_ID (a hash of the order of state in a
   generation) and PM_INSTANCE_ID (from the prefix of the names). Sizes in bytes are those of the build for float; other
   builds multiply them by PM_SCALE. */
#include "pm.h"
#include "pm_real.h"

/* Read or write `count` elements of a tensor, from `first` on, as pm_read_state, pm_write_state and pm_read_gradient do
   for all elements. Return PM_ERROR_INDEX if the tensor or these elements do not exist. Data on storage may pass
   through the part of the arena that is free between steps. */
int pm_read_state_part(int index, uint32_t first, uint32_t count, pm_real *to);
int pm_write_state_part(int index, uint32_t first, uint32_t count, const pm_real *from);
int pm_read_gradient_part(int index, uint32_t first, uint32_t count, pm_real *to);

/* The validity of state: none before pm_init or pm_resume succeeds, mixed by a torn step, or complete. */
enum { PM_HOLDS_NOTHING, PM_HOLDS_TORN, PM_HOLDS_STATE };
extern uint32_t pm_holds;

#if PM_RANDOM
extern uint32_t pm_random_step; /* see kernels/pm_random.h */
#endif

/* Storage with commits. The slots of generations of replaced state are PM_STATE_SLOTS apart. pm_generation is the
   place of the complete one, from which a step reads (PM_OLD). Before a step writes a tensor of the next one (PM_NEW),
   it calls pm_commit_begin(1), which writes the record. It writes all tensors in the order of their slots, waits, and
   calls pm_commit(), which writes the seal. pm_init calls pm_commit_clear(), and also writes all of the next
   generation. If storage is volatile (PM_VOLATILE), a step changes state at its home, as without commits, and the
   end of a step that commits copies all state to the next generation, which is pm_next from pm_commit_begin on. */
#if PM_COMMIT
extern uint32_t pm_generation, pm_next;
int pm_commit_clear(void);
/* The same, with place and pm_steps of the next one, and a number above that of another step. */
int pm_commit_clear_at(uint32_t place, uint32_t steps, uint32_t above);
extern uint32_t pm_numbers[2]; /* of the complete generation, and of the next one */
int pm_commit_begin(uint32_t steps); /* `steps` is added to pm_steps by pm_commit; 0 without a new step */
int pm_commit(void);
uint32_t pm_run_number(void); /* identifies the pm_init from which the state originates */
int pm_load_state(void); /* loads state in RAM from PM_OLD, or all state if storage is volatile; checks checksums */
#define PM_OLD(slot) ((slot) + pm_generation * PM_STATE_SLOTS)
#define PM_NEW(slot) ((slot) + pm_next * PM_STATE_SLOTS)
#else
#define PM_OLD(slot) (slot)
#define PM_NEW(slot) (slot)
#endif

/* Converts the error of a driver to PM_ERROR_PAGE unless it is one of those defined for drivers. */
static inline int pm_page_error(int error)
{
    return error >= PM_ERROR_PAGE && error <= PM_ERROR_BUSY ? error : PM_ERROR_PAGE;
}

/* Counters of the instructions of each node, with PM_PROFILE: pm_profile.c. */
void pm_profile_start(void); /* before each step */
void pm_profile_stop(void);  /* after it */
uint32_t pm_profile_node(uint32_t node); /* sets the node of the following instructions; returns the one before */
void pm_profile_print(uint32_t steps);

/* Driver calls in a step, whose instructions belong to no node. */
#ifdef PM_PROFILE
#define PM_ASIDE(line)                                        \
    const uint32_t pm_node = pm_profile_node(PM_NODES);       \
    line;                                                     \
    (void)pm_profile_node(pm_node)
#else
#define PM_ASIDE(line) line
#endif
/* Return from the function if a call fails: with its error, with that of a driver, or with PM_TORN. */
#define PM_TRY(call)                              \
    do {                                          \
        PM_ASIDE(const int pm_error = (call)); \
        if (pm_error) return pm_error;            \
    } while (0)
#define PM_TRY_PAGE(call)                         \
    do {                                          \
        PM_ASIDE(const int pm_error = (call));    \
        if (pm_error) return pm_page_error(pm_error); \
    } while (0)
#define PM_TRY_TORN(call)                         \
    do {                                          \
        PM_ASIDE(const int pm_error = (call)); \
        if (pm_error) return PM_TORN;             \
    } while (0)

/* The hook before each node, which the file PM_CONFIG may define. */
#ifdef PM_PROFILE
#define PM_NODE(node) ((void)pm_profile_node(node))
#elif !defined(PM_NODE)
#define PM_NODE(node) ((void)0)
#endif

/* Marks freed memory: fills it with NaN in builds that detect reads of it. */
#ifdef PM_POISON
#define PM_FREE(address, bytes) \
    ((void)memset(pm_arena + (size_t)(address) * PM_SCALE, 0xFF, (size_t)(bytes) * PM_SCALE))
#else
#define PM_FREE(address, bytes) ((void)0)
#endif

#endif
