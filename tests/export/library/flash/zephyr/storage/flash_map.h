/* What driver_flash_area.c takes of Zephyr 4: the signatures of include/zephyr/storage/flash_map.h. */
#ifndef FLASH_MAP_H
#define FLASH_MAP_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct device;

struct flash_area {
    uint8_t fa_id;
    uint8_t fa_device_id;
    uint16_t pad16;
    off_t fa_off;
    size_t fa_size;
    const struct device *fa_dev;
};

int flash_area_open(uint8_t id, const struct flash_area **fa);
int flash_area_read(const struct flash_area *fa, off_t off, void *dst, size_t len);
int flash_area_write(const struct flash_area *fa, off_t off, const void *src, size_t len);
int flash_area_erase(const struct flash_area *fa, off_t off, size_t len);
uint32_t flash_area_align(const struct flash_area *fa);
uint8_t flash_area_erased_val(const struct flash_area *fa);

/* A label of the devicetree, here one that the test knows. */
#define ID_OF(label) ID_OF_##label
#define FIXED_PARTITION_ID(label) ID_OF(label)
#define ID_OF_pm_partition 3

extern uintptr_t nor_base;
#define CONFIG_FLASH_BASE_ADDRESS nor_base

#endif
