/* A model of flash storage, for hosts and emulated boards (DRIVER=nor): a write to the first byte of a block erases
   the block; all writes must be to erased bytes, and begin at a write unit. A block endures PM_ENDURANCE erases. */
#include <string.h>

#define PM_FLASH_DRIVER
#include "../port/pm_pages.h"

#include "pm_platform.h"
#include "pm_text.h"

#ifndef PM_ENDURANCE
#define PM_ENDURANCE 0xFFFFFFFFu
#endif

#ifdef __arm__
#define PM_EXTERNAL __attribute__((section(".storage")))
#define PM_COUNTS __attribute__((section(".measure")))
#else
#define PM_EXTERNAL
#define PM_COUNTS
#endif

#define STORAGE_BYTES (PM_STORED_BYTES ? PM_STORED_BYTES * PM_SCALE : PM_STORAGE_BLOCK)

static _Alignas(16) unsigned char pm_storage[STORAGE_BYTES] PM_EXTERNAL; /* not erased at first */
static uint32_t pm_erased[STORAGE_BYTES / PM_STORAGE_BLOCK + 1u] PM_COUNTS;
static uint32_t pm_erases, pm_written;
uint32_t pm_storage_ticks;

static int pm_is_outside(uint32_t address, uint32_t bytes)
{
    return address > STORAGE_BYTES || bytes > STORAGE_BYTES - address;
}

static int pm_erase(uint32_t block)
{
    if (pm_erased[block] >= PM_ENDURANCE) return PM_ERROR_PAGE;
    pm_erased[block]++;
    pm_erases++;
    memset(pm_storage + block * PM_STORAGE_BLOCK, 0xFF, PM_STORAGE_BLOCK);
    return PM_OK;
}

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    if (pm_is_outside(address, bytes)) return PM_ERROR_PAGE;
    memcpy(to, pm_storage + address, bytes);
    return PM_OK;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    const uint32_t before = (address + PM_STORAGE_BLOCK - 1u) / PM_STORAGE_BLOCK;
    const uint32_t after = (address + bytes + PM_STORAGE_BLOCK - 1u) / PM_STORAGE_BLOCK;
    const uint32_t start = pm_ticks();
    if (pm_is_outside(address, bytes) || address % PM_STORAGE_UNIT) return PM_ERROR_PAGE;
    for (uint32_t block = before; block < after; block++) {
        if (pm_erase(block)) return PM_ERROR_PAGE;
    }
    for (uint32_t k = 0; k < bytes; k++) {
        if (pm_storage[address + k] != 0xFF) return PM_ERROR_PAGE;
    }
    memcpy(pm_storage + address, from, bytes);
    pm_written += bytes;
    pm_storage_ticks += pm_ticks() - start;
    return PM_OK;
}

#if PM_MAPPED
const void *pm_storage_address(uint32_t address)
{
    return pm_storage + address;
}
#endif

static void pm_print_count(const char *name, uint32_t count)
{
    char text[PM_TEXT_BYTES];
    pm_complain(name);
    pm_complain(pm_text_of_integer(count, text));
    pm_complain("\n");
}

void pm_print_wear(void)
{
    uint32_t most = 0;
    for (uint32_t k = 0; k < sizeof pm_erased / sizeof *pm_erased; k++) {
        most = pm_erased[k] > most ? pm_erased[k] : most;
    }
    pm_print_count("storage_bytes ", pm_written);
    pm_print_count("storage_erases ", pm_erases);
    pm_print_count("storage_worn ", most);
}
