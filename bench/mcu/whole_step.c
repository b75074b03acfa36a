/* Calls all that an exported step offers, so that the linker keeps it. */
#include "pm.h"
#if PM_SLOTS || PM_REPLAY
#include "port/pm_pages.h"
int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    (void)address, (void)to;
    return bytes > 1000000u;
}
int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    (void)address, (void)from;
    return bytes > 1000000u;
}
#if PM_MAPPED
const void *pm_storage_address(uint32_t address) { return (const void *)(uintptr_t)address; }
#endif
#endif
static const void *inputs[PM_INPUTS ? PM_INPUTS : 1];
static pm_real values[4];
static uint32_t number;
int app(void);
int app(void)
{
    int error = pm_init();
#if PM_COMMIT
    error |= pm_resume();
#endif
    error |= pm_step(inputs, values[0], values);
    error |= pm_read_state(0, values) | pm_write_state(0, values);
#if PM_GRADIENTS
    error |= pm_read_gradient(0, values);
#endif
#if PM_OUTPUTS
    error |= pm_infer(inputs, values);
#endif
#if PM_EVALUATES
    error |= pm_evaluate(inputs, values, &number);
#endif
#if PM_BEST
    error |= pm_keep_best(values[0]) | pm_best(values, &number) | pm_restore_best();
#endif
#if PM_REPLAY
    error |= pm_keep_sample(inputs, &number) | pm_step_stored(PM_ANY_SAMPLE, values[0], values);
#endif
#if PM_MIGRATES
    error |= pm_migrate();
#endif
    return error;
}
