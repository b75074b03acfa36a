/* Delayed transfers in front of a page driver (LATE=1): each is executed at its wait, like the slowest DMA. Until
   then, memory that a page-in will overwrite contains NaN. Use of a slot during its transfer is PM_ERROR_BUSY. */
#include "../src/pm_runtime.h"

int __real_pm_page_out(uint32_t slot, const void *from, uint32_t bytes);
int __real_pm_page_in(uint32_t slot, void *to, uint32_t bytes);
int __real_pm_page_wait(uint32_t slot);
int __wrap_pm_page_out(uint32_t slot, const void *from, uint32_t bytes);
int __wrap_pm_page_in(uint32_t slot, void *to, uint32_t bytes);
int __wrap_pm_page_wait(uint32_t slot);

static struct {
    const void *from;
    void *to;
    uint32_t bytes;
} pm_under_way[PM_SLOTS ? PM_SLOTS : 1];

static int pm_is_slot(uint32_t slot)
{
    const uint32_t slots = PM_SLOTS; /* may be 0 */
    return slot < slots;
}

static int pm_begin(uint32_t slot, const void *from, void *to, uint32_t bytes)
{
    if (!pm_is_slot(slot)) return PM_ERROR_SLOT;
    if (pm_under_way[slot].from || pm_under_way[slot].to) return PM_ERROR_BUSY;
    pm_under_way[slot].from = from;
    pm_under_way[slot].to = to;
    pm_under_way[slot].bytes = bytes;
    return PM_OK;
}

int __wrap_pm_page_out(uint32_t slot, const void *from, uint32_t bytes)
{
    return pm_begin(slot, from, 0, bytes);
}

int __wrap_pm_page_in(uint32_t slot, void *to, uint32_t bytes)
{
    PM_TRY(pm_begin(slot, 0, to, bytes));
    memset(to, 0xFF, bytes);
    return PM_OK;
}

int __wrap_pm_page_wait(uint32_t slot)
{
    if (!pm_is_slot(slot)) return PM_ERROR_SLOT;
    const void *const from = pm_under_way[slot].from;
    void *const to = pm_under_way[slot].to;
    pm_under_way[slot].from = 0;
    pm_under_way[slot].to = 0;
    if (from) PM_TRY(__real_pm_page_out(slot, from, pm_under_way[slot].bytes));
    if (to) PM_TRY(__real_pm_page_in(slot, to, pm_under_way[slot].bytes));
    return __real_pm_page_wait(slot);
}
