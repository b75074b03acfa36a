/* Storage in memory outside of the step's RAM limit: a RAM disk, or memory-mapped external memory such as SDRAM or
   PSRAM, whose controller the application sets up before pm_init. Define PM_STORAGE_ADDRESS as its start, or
   PM_STORAGE_SECTION as a linker section in it, in quotes. */
#include <string.h>

#include "pm_pages.h"

#if !defined(PM_STORAGE_SECTION) && defined(__arm__)
#define PM_STORAGE_SECTION ".storage"
#endif
#ifdef PM_STORAGE_SECTION
#define PM_EXTERNAL __attribute__((section(PM_STORAGE_SECTION)))
#else
#define PM_EXTERNAL
#endif

#ifndef PM_STORAGE_BYTES
#define PM_STORAGE_BYTES (PM_STORED_BYTES ? PM_STORED_BYTES * sizeof(pm_real) / 4u : 1u)
#endif

#ifdef PM_STORAGE_ADDRESS
static unsigned char *const pm_storage = (unsigned char *)(uintptr_t)(PM_STORAGE_ADDRESS);
#else
static _Alignas(16) unsigned char pm_storage[PM_STORAGE_BYTES] PM_EXTERNAL;
#endif

static int pm_is_outside(uint32_t address, uint32_t bytes)
{
    return address > PM_STORAGE_BYTES || bytes > PM_STORAGE_BYTES - address;
}

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    if (pm_is_outside(address, bytes)) return PM_ERROR_PAGE;
    memcpy(to, pm_storage + address, bytes);
    return PM_OK;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    if (pm_is_outside(address, bytes)) return PM_ERROR_PAGE;
    memcpy(pm_storage + address, from, bytes);
    return PM_OK;
}

const void *pm_storage_address(uint32_t address)
{
    return pm_storage + address;
}
