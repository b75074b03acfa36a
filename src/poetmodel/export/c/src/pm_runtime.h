/* What the generated code gives to the code written by hand, and the other way round. */
#ifndef PM_RUNTIME_H
#define PM_RUNTIME_H

#include <string.h>

/* pm.h defines PM_INPUTS, PM_STATES, PM_NODES, PM_GRADIENTS (0 with an optimizer), PM_INPUT_BYTES (of all inputs,
   4 for each element), PM_OUTPUTS (elements that pm_infer writes; 0 where it is not there), PM_SLOTS (with both
   generations), PM_COMMIT (0 or 1), PM_MAPPED (0 or 1: storage is read like RAM), PM_RANDOM (0 or 1: it draws random
   numbers), PM_STEP_ID (a number made from the graph), and with PM_COMMIT PM_STATE_SLOTS (of one generation).
   Sizes in bytes are those of the float build; all are PM_SCALE times that. */
#include "pm.h"
#include "pm_real.h"

/* Elements first, first + 1, ... of a tensor, as pm_read_state, pm_write_state and pm_read_gradient move all of them. What is on
   storage may pass through the part of the arena that is free between steps. */
int pm_read_state_part(int index, uint32_t first, uint32_t count, pm_real *to);
int pm_write_state_part(int index, uint32_t first, uint32_t count, const pm_real *from);
int pm_read_gradient_part(int index, uint32_t first, uint32_t count, pm_real *to);

/* Storage with commits. State has two generations, whose slots are PM_STATE_SLOTS apart; pm_generation says which one
   is whole. A step reads that (PM_OLD), writes all of the other (PM_NEW), waits, and ends with pm_commit(). pm_init
   begins with pm_commit_clear(), writes both generations, and ends with pm_commit(). */
#if PM_COMMIT
extern uint32_t pm_generation;
int pm_commit_clear(void);
int pm_commit(void);
int pm_load_resident(void); /* generated: pages in all state that lives in RAM, from PM_OLD */
#define PM_OLD(slot) ((slot) + pm_generation * PM_STATE_SLOTS)
#define PM_NEW(slot) ((slot) + (1u - pm_generation) * PM_STATE_SLOTS)
#else
#define PM_OLD(slot) (slot)
#define PM_NEW(slot) (slot)
#endif

/* Instructions of each node, where they are counted. */
void pm_profile_start(void); /* before each step */
void pm_profile_stop(void);  /* after it */
uint32_t pm_profile_node(uint32_t node); /* what runs from here on is of this node; returns that of until now */
void pm_profile_print(uint32_t steps);

/* The lines of a step: calls of the driver, which are of no node. */
#ifdef PM_PROFILE
#define PM_ASIDE(line)                                        \
    const uint32_t pm_node = pm_profile_node(PM_NODES);       \
    line;                                                     \
    (void)pm_profile_node(pm_node)
#else
#define PM_ASIDE(line) line
#endif
#define PM_TRY(call)                              \
    do {                                          \
        PM_ASIDE(const int pm_error = (call)); \
        if (pm_error) return pm_error;            \
    } while (0)
#define PM_TRY_TORN(call)                         \
    do {                                          \
        PM_ASIDE(const int pm_error = (call)); \
        if (pm_error) return PM_TORN;             \
    } while (0)

/* What runs before each node: a hook, which the file PM_CONFIG may define. */
#ifdef PM_PROFILE
#define PM_NODE(node) ((void)pm_profile_node(node))
#elif !defined(PM_NODE)
#define PM_NODE(node) ((void)0)
#endif

/* Memory that nothing may read any more: NaN where that is looked for. */
#ifdef PM_POISON
#define PM_FREE(address, bytes) \
    ((void)memset(pm_arena + (size_t)(address) * PM_SCALE, 0xFF, (size_t)(bytes) * PM_SCALE))
#else
#define PM_FREE(address, bytes) ((void)0)
#endif

#endif
