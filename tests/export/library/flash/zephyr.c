/* Zephyr's flash areas over the flash of a test: one partition, behind the first 64 KiB. */
#include <stdlib.h>

#include "nor.h"
#include "zephyr/storage/flash_map.h"

uintptr_t nor_base;

static const struct flash_area area = {.fa_id = ID_OF_pm_partition, .fa_off = 65536, .fa_size = NOR_BYTES - 65536u};

int flash_area_open(uint8_t id, const struct flash_area **fa)
{
    nor_base = (uintptr_t)nor_memory();
    *fa = id == area.fa_id ? &area : 0;
    return *fa ? 0 : -2;
}

int flash_area_read(const struct flash_area *fa, off_t off, void *dst, size_t len)
{
    return nor_read((size_t)(fa->fa_off + off), dst, len);
}

int flash_area_write(const struct flash_area *fa, off_t off, const void *src, size_t len)
{
    return nor_write((size_t)(fa->fa_off + off), src, len);
}

int flash_area_erase(const struct flash_area *fa, off_t off, size_t len)
{
    return nor_erase((size_t)(fa->fa_off + off), len);
}

uint32_t flash_area_align(const struct flash_area *fa)
{
    (void)fa;
    return nor_unit();
}

uint8_t flash_area_erased_val(const struct flash_area *fa)
{
    (void)fa;
    return 0xFF;
}
