/* Partitions of ESP-IDF over the flash of a test: one, behind the first 64 KiB; encrypted ones are written by 16 B. */
#include <string.h>

#include "esp_partition.h"
#include "nor.h"

const esp_partition_t *esp_partition_find_first(esp_partition_type_t type, esp_partition_subtype_t subtype,
                                                const char *label)
{
    static esp_partition_t partition = {
        .type = ESP_PARTITION_TYPE_DATA,
        .subtype = ESP_PARTITION_SUBTYPE_DATA_UNDEFINED,
        .address = 65536,
        .size = NOR_BYTES - 65536u,
        .erase_size = NOR_SECTOR,
        .label = "pm_pages",
    };
    partition.encrypted = nor_unit() == 16u;
    const bool is_it = type == partition.type && subtype == ESP_PARTITION_SUBTYPE_ANY;
    return is_it && strcmp(label, partition.label) == 0 ? &partition : 0;
}

esp_err_t esp_partition_read(const esp_partition_t *partition, size_t src_offset, void *dst, size_t size)
{
    return nor_read(partition->address + src_offset, dst, size);
}

esp_err_t esp_partition_write(const esp_partition_t *partition, size_t dst_offset, const void *src, size_t size)
{
    return nor_write(partition->address + dst_offset, src, size);
}

esp_err_t esp_partition_erase_range(const esp_partition_t *partition, size_t offset, size_t size)
{
    return nor_erase(partition->address + offset, size);
}

esp_err_t esp_partition_mmap(const esp_partition_t *partition, size_t offset, size_t size,
                             esp_partition_mmap_memory_t memory, const void **out_ptr,
                             esp_partition_mmap_handle_t *out_handle)
{
    (void)size;
    *out_handle = 1;
    *out_ptr = nor_memory() + partition->address + offset;
    return memory == ESP_PARTITION_MMAP_DATA ? ESP_OK : -1;
}
