/* Fault injection in front of storage (FAULTS=1): one fault, at the call in the last argument of pm_run, such as
   fail:3. */
#include "pm_faults.h"

#include <string.h>

#include "../port/pm_storage.h"
#include "pm.h"
#include "pm_platform.h"

uint32_t pm_reads, pm_writes;
static char pm_kind[8];
static uint32_t pm_call;

int pm_set_fault(const char *kind, uint32_t call)
{
    static const char known[] = " fail short old empty flip cut ";
    const char *const found = strstr(known, kind);
    const size_t length = strlen(kind);
    if (!found || length == 0 || found == known || found[-1] != ' ' || found[length] != ' ') return PM_ERROR_INDEX;
    memcpy(pm_kind, kind, length + 1u);
    pm_call = call;
    return PM_OK;
}

static int pm_is_now(const char *kind, uint32_t calls)
{
    return calls == pm_call && strcmp(kind, pm_kind) == 0;
}

int pm_faulty_read(int (*read)(uint32_t, void *, uint32_t), uint32_t address, void *to, uint32_t bytes)
{
    pm_reads++;
    if (pm_is_now("fail", pm_reads + pm_writes)) return PM_ERROR_PAGE;
    if (pm_is_now("short", pm_reads + pm_writes)) {
        const int error = read(address, to, bytes / 2u);
        return error ? error : PM_ERROR_SHORT;
    }
    if (pm_is_now("empty", pm_reads)) return PM_OK; /* no bytes are read, without an error */
    const int error = read(address, to, bytes);
    if (pm_is_now("flip", pm_reads)) ((uint8_t *)to)[bytes / 2u] ^= 0x40u;
    return error;
}

int pm_faulty_write(int (*write)(uint32_t, const void *, uint32_t), uint32_t address, const void *from, uint32_t bytes)
{
    pm_writes++;
    if (pm_is_now("fail", pm_reads + pm_writes)) return PM_ERROR_PAGE;
    if (pm_is_now("short", pm_reads + pm_writes)) {
        const int error = write(address, from, bytes / 2u);
        return error ? error : PM_ERROR_SHORT;
    }
    if (pm_is_now("old", pm_writes)) return PM_OK; /* the old content stays, without an error */
    if (pm_is_now("cut", pm_writes)) {
        (void)write(address, from, bytes / 2u);
        pm_exit(9);
    }
    return write(address, from, bytes);
}
