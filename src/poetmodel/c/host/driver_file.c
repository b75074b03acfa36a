/* Storage in a file of the host, by semihosting if on an emulated board. */
#include <string.h>

#define PM_FLASH_DRIVER
#include "../port/pm_pages.h"
#include "pm_platform.h"

#ifndef PM_STORAGE_FILE
#define PM_STORAGE_FILE "pm_storage.bin"
#endif

static int pm_storage_file(uint32_t address)
{
    static int file = -1;
    if (file < 0) file = pm_file_open(PM_STORAGE_FILE, PM_FILE_KEEP);
    return file < 0 || pm_file_seek(file, address) < 0 ? -1 : file;
}

static int pm_read_file(uint32_t address, void *to, uint32_t bytes)
{
    const int file = pm_storage_file(address);
    if (file < 0) return PM_ERROR_PAGE;
    const uint32_t there = pm_file_read(file, to, bytes);
    memset((unsigned char *)to + there, 0xFF, bytes - there); /* bytes never written are erased */
    return PM_OK;
}

#if PM_MAPPED /* a copy of the file for reads by the core; each write changes both */
#ifdef __arm__
#define PM_EXTERNAL __attribute__((section(".storage")))
#else
#define PM_EXTERNAL
#endif

static _Alignas(16) unsigned char pm_copy[PM_STORED_BYTES ? PM_STORED_BYTES * sizeof(pm_real) / 4u : 1u] PM_EXTERNAL;

static int pm_is_outside(uint32_t address, uint32_t bytes)
{
    static int is_read;
    if (!is_read) is_read = pm_read_file(0, pm_copy, sizeof pm_copy) == PM_OK;
    return !is_read || address > sizeof pm_copy || bytes > sizeof pm_copy - address;
}

const void *pm_storage_address(uint32_t address)
{
    return pm_is_outside(address, 0) ? 0 : pm_copy + address;
}
#endif

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
#if PM_MAPPED
    if (pm_is_outside(address, bytes)) return PM_ERROR_PAGE;
    memcpy(to, pm_copy + address, bytes);
    return PM_OK;
#else
    return pm_read_file(address, to, bytes);
#endif
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
#if PM_MAPPED
    if (pm_is_outside(address, bytes)) return PM_ERROR_PAGE;
    memcpy(pm_copy + address, from, bytes);
#endif
    const int file = pm_storage_file(address);
    if (file < 0) return PM_ERROR_PAGE;
    return pm_file_write(file, from, bytes) == bytes ? PM_OK : PM_ERROR_SHORT;
}
