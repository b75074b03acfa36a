/* A toy of generated code: loss = (k (w.x + b) - 1)^2, with w on storage, b in RAM, and a page between. */
#ifndef PM_H
#define PM_H

#include <stdint.h>

#include "../pm_driver.h"

#ifndef PM_COMMIT
#define PM_COMMIT 0
#endif
#define PM_VOLATILE 0
#ifndef PM_MAPPED
#define PM_MAPPED 0
#endif
#ifdef TOY_GRADIENTS
#define PM_GRADIENTS 2
#define TOY_GRADIENT_SLOTS 2
#else
#define PM_GRADIENTS 0
#define TOY_GRADIENT_SLOTS 0
#endif

#define PM_ARENA_BYTES 64
#define PM_ALIGNMENT 16
#define PM_INPUTS 2
#define PM_INPUT_BYTES 24
#define PM_STATES 3
#define PM_NODES 3
#if PM_COMMIT
#define PM_PAGE_SLOTS (1u + TOY_GRADIENT_SLOTS)
#define PM_STATE_SLOTS 4u
#define PM_STATE_SUMS 1
#else
#define PM_PAGE_SLOTS (3u + TOY_GRADIENT_SLOTS)
#define PM_STATE_SLOTS 0u
#define PM_STATE_SUMS 0
#endif
#ifndef PM_GENERATIONS
#define PM_GENERATIONS 2u
#endif
#define PM_BLOCK_GENERATIONS 1u
#define PM_PLACES PM_GENERATIONS
#define PM_GROUPS 0u
#define PM_PITCH_STEP 256u
#define PM_SLOTS (PM_PAGE_SLOTS + PM_GENERATIONS * PM_STATE_SLOTS)
#ifndef PM_STORAGE_UNIT
#define PM_STORAGE_UNIT 1u
#endif
#ifndef PM_STORAGE_BLOCK
#define PM_STORAGE_BLOCK 4096u
#endif
#define PM_COMMIT_UNIT PM_STORAGE_UNIT
#define PM_COMMIT_BLOCK PM_STORAGE_BLOCK
#define PM_STORED_BYTES 65536u
#define PM_INSTANCE_ID 0x33334444u
#define PM_STEP_ID 0x70591234u
#define PM_LAYOUT_ID 0x11112222u

int pm_init(void);
int pm_step(const void *const inputs[PM_INPUTS], pm_real lr, pm_real *loss);
int pm_read_state(int index, pm_real *to);
int pm_read_gradient(int index, pm_real *to);
int pm_resume(void);
extern uint32_t pm_commits, pm_steps;

#endif
