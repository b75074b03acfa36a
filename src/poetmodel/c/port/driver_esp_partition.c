/* Storage on a partition of an ESP32: that of type data in the partition table with label PM_PARTITION. A block is
   erased when its first byte is written. Storage begins at PM_FLASH_START in the partition, for two networks in one
   partition. */
#include <string.h>

#include "esp_partition.h"

static inline unsigned int pm_chip_unit(void);
#define PM_CHIP_UNIT pm_chip_unit()
#define PM_FLASH_DRIVER
#include "pm_pages.h"

#define PM_MOST_UNIT 16u /* write unit of an encrypted partition */

#ifndef PM_PARTITION
#define PM_PARTITION "pm_pages"
#endif
_Static_assert(sizeof PM_PARTITION <= 17, "a label has 16 characters at most: define PM_PARTITION as a shorter one");

#if PM_MAPPED && !PM_COMMIT
#error "flash loses a block before it is written, which a step still reads: export with --commit"
#endif

static const esp_partition_t *pm_partition(void)
{
    static const esp_partition_t *partition;
    if (!partition) {
        partition = esp_partition_find_first(ESP_PARTITION_TYPE_DATA, ESP_PARTITION_SUBTYPE_ANY, PM_PARTITION);
    }
    return partition;
}

static inline unsigned int pm_chip_unit(void)
{
    const esp_partition_t *const partition = pm_partition();
    return partition && partition->encrypted ? PM_MOST_UNIT : 1u;
}

/* Returns the partition, or 0 if there is none, or if storage does not fit it. */
static const esp_partition_t *pm_whole_partition(void)
{
    const esp_partition_t *const partition = pm_partition();
    return partition && pm_flash_holds(partition->size) ? partition : 0;
}

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    const esp_partition_t *const partition = pm_whole_partition();
    if (!partition) return PM_ERROR_PAGE;
    return esp_partition_read(partition, PM_FLASH_START + address, to, bytes) == ESP_OK ? PM_OK : PM_ERROR_PAGE;
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    const esp_partition_t *const partition = pm_whole_partition();
    unsigned char last[PM_MOST_UNIT];
    if (!partition) return PM_ERROR_PAGE;
    const uint32_t unit = pm_chip_unit();
    if (address % unit) return PM_ERROR_PAGE;
    address += PM_FLASH_START;

    const uint32_t before = (address + PM_STORAGE_BLOCK - 1u) / PM_STORAGE_BLOCK;
    const uint32_t after = (address + bytes + PM_STORAGE_BLOCK - 1u) / PM_STORAGE_BLOCK;
    const uint32_t first = before * PM_STORAGE_BLOCK;
    const uint32_t erased = (after - before) * PM_STORAGE_BLOCK;
    if (erased && esp_partition_erase_range(partition, first, erased) != ESP_OK) return PM_ERROR_PAGE;

    const uint32_t rest = bytes % unit;
    const uint32_t whole = bytes - rest;
    if (whole && esp_partition_write(partition, address, from, whole) != ESP_OK) return PM_ERROR_PAGE;
    if (rest == 0) return PM_OK;
    memset(last, 0xFF, sizeof last);
    memcpy(last, (const unsigned char *)from + whole, rest);
    return esp_partition_write(partition, address + whole, last, unit) == ESP_OK ? PM_OK : PM_ERROR_PAGE;
}

#if PM_MAPPED
const void *pm_storage_address(uint32_t address)
{
    static const void *mapped;
    const esp_partition_t *const partition = pm_whole_partition();
    if (!mapped) {
        esp_partition_mmap_handle_t handle;
        if (!partition) return 0;
        if (esp_partition_mmap(partition, 0, partition->size, ESP_PARTITION_MMAP_DATA, &mapped, &handle)) return 0;
    }
    return (const unsigned char *)mapped + PM_FLASH_START + address;
}
#endif
