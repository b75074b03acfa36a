/* Calls all that an exported step offers, so that the linker keeps it. */
#include "pm.h"
#if PM_SLOTS
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
    return error;
}
