/* Storage in a file: of a host, or by semihosting of the machine that emulates a board. */
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

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    const int file = pm_storage_file(address);
    if (file < 0) return PM_ERROR_PAGE;
    const uint32_t there = pm_file_read(file, to, bytes);
    memset((unsigned char *)to + there, 0xFF, bytes - there); /* what was never written is erased */
    return PM_OK;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    const int file = pm_storage_file(address);
    if (file < 0) return PM_ERROR_PAGE;
    return pm_file_write(file, from, bytes) == bytes ? PM_OK : PM_ERROR_SHORT;
}
