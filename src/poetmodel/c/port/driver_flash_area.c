/* Storage on a flash area of Zephyr: the partition of the devicetree with node label PM_PARTITION, on a chip or in
   the flash of the SoC. A block is erased when its first byte is written. Storage begins at PM_FLASH_START in the
   partition, for two networks in one partition. */
#include <string.h>
#include <zephyr/storage/flash_map.h>

static inline unsigned int pm_chip_unit(void);
#define PM_CHIP_UNIT pm_chip_unit()
#define PM_FLASH_DRIVER
#include "pm_pages.h"

#define PM_MOST_UNIT 32u /* no flash has a larger write block */

#ifndef PM_PARTITION
#define PM_PARTITION pm_partition
#endif
#ifdef PARTITION_ID /* Zephyr 4.4 and newer */
#define PM_PARTITION_ID PARTITION_ID(PM_PARTITION)
#else
#define PM_PARTITION_ID FIXED_PARTITION_ID(PM_PARTITION)
#endif

#if PM_MAPPED && !PM_COMMIT
#error "flash loses a block before it is written, which a step still reads: export with --commit"
#endif

static int pm_area(const struct flash_area **area)
{
    static const struct flash_area *opened;
    if (!opened && flash_area_open(PM_PARTITION_ID, &opened)) opened = 0;
    *area = opened;
    return opened ? PM_OK : PM_ERROR_PAGE;
}

static inline unsigned int pm_chip_unit(void)
{
    const struct flash_area *area;
    return pm_area(&area) ? 1u : flash_area_align(area);
}

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    const struct flash_area *area;
    if (pm_area(&area) || !pm_flash_holds((uint32_t)area->fa_size)) return PM_ERROR_PAGE;
    return flash_area_read(area, (off_t)(PM_FLASH_START + address), to, bytes) ? PM_ERROR_PAGE : PM_OK;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    const struct flash_area *area;
    unsigned char last[PM_MOST_UNIT];
    const int error = pm_area(&area);
    if (error || !pm_flash_holds((uint32_t)area->fa_size)) return PM_ERROR_PAGE;
    const uint32_t unit = flash_area_align(area);
    if (unit == 0 || unit > sizeof last || address % unit) return PM_ERROR_PAGE;
    address += PM_FLASH_START;

    const uint32_t before = (address + PM_STORAGE_BLOCK - 1u) / PM_STORAGE_BLOCK;
    const uint32_t after = (address + bytes + PM_STORAGE_BLOCK - 1u) / PM_STORAGE_BLOCK;
    const off_t first = (off_t)before * PM_STORAGE_BLOCK;
    const size_t erased = (size_t)(after - before) * PM_STORAGE_BLOCK;
    if (erased && flash_area_erase(area, first, erased)) return PM_ERROR_PAGE;

    const uint32_t rest = bytes % unit;
    const uint32_t whole = bytes - rest;
    if (whole && flash_area_write(area, (off_t)address, from, whole)) return PM_ERROR_PAGE;
    if (rest == 0) return PM_OK;
    memset(last, flash_area_erased_val(area), unit);
    memcpy(last, (const unsigned char *)from + whole, rest);
    return flash_area_write(area, (off_t)(address + whole), last, unit) ? PM_ERROR_PAGE : PM_OK;
}

#if PM_MAPPED
/* Returns 0 if the area cannot be opened. Only the flash of the SoC is memory-mapped. */
const void *pm_storage_address(uint32_t address)
{
    const struct flash_area *area;
    if (pm_area(&area)) return 0;
    return (const void *)((uintptr_t)CONFIG_FLASH_BASE_ADDRESS + (uintptr_t)area->fa_off + PM_FLASH_START + address);
}
#endif
