/* A training step in one call, or in slices that let the application use the core in between. */
#include "pm_state.h"

enum { FIRST_SLICE = 1 };

pm_progress_t pm_progress;

int pm_step_begin(const void *const inputs[PM_INPUTS], pm_real lr)
{
#ifdef PM_ARENA_EXTERN
    if (!pm_arena) return PM_ERROR_ARENA;
#endif
    if (pm_holds != PM_HOLDS_STATE) return PM_ERROR_STATE;
    if (pm_progress.slice) return PM_ERROR_BUSY;
    if (!pm_is_finite(lr)) return PM_ERROR_NUMBER;
    for (uint32_t k = 0; k < (uint32_t)PM_INPUTS; k++) pm_progress.inputs[k] = inputs[k];
    pm_progress.lr = lr;
#if PM_REPLAY
    pm_progress.way = PM_WAY_WHOLE;
#endif
    pm_progress.slice = FIRST_SLICE;
    return PM_OK;
}

int pm_step_some(uint32_t nodes)
{
    if (!pm_progress.slice) return PM_ERROR_IDLE;
    if (nodes == 0) return PM_MORE;
    /* A slice after the first begins with a node, which counts. */
    const int error = pm_run_nodes(pm_progress.slice == FIRST_SLICE ? nodes : nodes - 1u);
    if (error != PM_MORE) pm_progress.slice = 0;
    if (error == PM_TORN) pm_holds = PM_HOLDS_TORN;
    return error;
}

pm_real pm_loss(void)
{
    return pm_progress.loss;
}

int pm_step(const void *const inputs[PM_INPUTS], pm_real lr, pm_real *loss)
{
    PM_TRY(pm_step_begin(inputs, lr));
    const int error = pm_step_some(0xFFFFFFFFu);
    if (!error) *loss = pm_progress.loss;
    return error;
}
