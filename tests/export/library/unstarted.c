/* Calls of a step without state: before pm_init and pm_resume have succeeded, after one that failed, and after a torn
   step. Each is refused, and storage is written by none. The first that is not is printed. */
#include <stdio.h>
#include <string.h>

#include "pm.h"
#define PM_FLASH_DRIVER
#include "port/pm_pages.h"

enum { ELEMENTS = 8192 };

static unsigned char storage[PM_STORED_BYTES + 1u];
static unsigned long writes, fail_at;
static pm_real data[PM_INPUTS][ELEMENTS], values[ELEMENTS];
static const void *inputs[PM_INPUTS];

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    memcpy(to, storage + address, bytes);
    return PM_OK;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    if (++writes == fail_at) return PM_ERROR_PAGE;
    memcpy(storage + address, from, bytes);
    return PM_OK;
}

#if PM_MAPPED
const void *pm_storage_address(uint32_t address)
{
    return storage + address;
}
#endif

static int refused(const char *what, int error)
{
    if (error != PM_ERROR_STATE) printf("%s: %d\n", what, error);
    return error != PM_ERROR_STATE;
}

/* How many calls were not refused; a torn state may be read. */
static int calls(int is_torn)
{
    const unsigned long before = writes;
    pm_real loss = -1;
    int wrong = refused("step", pm_step(inputs, (pm_real)0.1, &loss)) + (loss != -1);
    wrong += refused("begin", pm_step_begin(inputs, (pm_real)0.1));
    if (pm_step_some(1) != PM_ERROR_IDLE) wrong++, puts("a step is under way");
    wrong += refused("write", pm_write_state(0, values));
#if PM_COMMIT
    wrong += refused("commit", pm_commit_now());
#endif
    if (!is_torn) wrong += refused("read", pm_read_state(0, values));
    else if (pm_read_state(0, values)) wrong++, puts("a torn state is not read");
    if (pm_read_state(PM_STATES, values) != PM_ERROR_INDEX) wrong++, puts("no such tensor");
    if (writes != before) wrong++, puts("storage was written");
    return wrong;
}

int main(void)
{
    pm_real loss;
    memset(storage, 0xFF, sizeof storage);
    for (int k = 0; k < PM_INPUTS; k++) inputs[k] = data[k];
    if (calls(0)) return 1;
#if PM_COMMIT
    if (pm_resume() != PM_ERROR_EMPTY || calls(0)) return 2;
#endif
    fail_at = writes + 2;
    if (pm_init() != PM_ERROR_PAGE || calls(0)) return 3;
    if (pm_init() || pm_step(inputs, (pm_real)0.1, &loss)) return 4;
    int torn = 0;
    for (unsigned long call = 1;; call++) {
        fail_at = writes + call;
        const int error = pm_step(inputs, (pm_real)0.1, &loss);
        if (error == PM_OK) break;
        fail_at = 0;
        if (error != PM_TORN) continue;
        torn++;
        if (calls(1)) return 5;
#if PM_COMMIT
        if (pm_resume()) return 6;
#else
        if (pm_init()) return 6;
#endif
        if (pm_read_state(0, values) || pm_step(inputs, (pm_real)0.1, &loss)) return 7;
    }
    if (!torn) return 8;
#if PM_COMMIT
    memset(storage, 0xFF, sizeof storage);
    if (pm_resume() != PM_ERROR_EMPTY || calls(0)) return 9; /* also where there was state before */
#endif
    return 0;
}
