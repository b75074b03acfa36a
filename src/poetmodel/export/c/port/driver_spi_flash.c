/* Storage on serial NOR flash with the usual commands, up to 16 MiB: pages of 256 B, sectors of 4 KiB. A sector is
   erased when its first byte is written. */
#define PM_FLASH_DRIVER
#include "pm_pages.h"
#include "pm_spi.h"

#define PM_FLASH_PAGE 256u
#define PM_FLASH_SECTOR 4096u
#define PM_FLASH_POLLS 10000000u /* far more than the slowest erase takes */

#if PM_STORAGE_BLOCK % 4096u
#error "slots on flash begin where a sector does: PM_STORAGE_BLOCK must be a multiple of 4096"
#endif

enum { PAGE_PROGRAM = 0x02, READ = 0x03, READ_STATUS = 0x05, WRITE_ENABLE = 0x06, SECTOR_ERASE = 0x20 };

static int pm_flash_command(uint8_t code, uint32_t address, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    const uint8_t command[4] = {code, (uint8_t)(address >> 16), (uint8_t)(address >> 8), (uint8_t)address};
    if (address > 0xFFFFFFu) return PM_ERROR_PAGE;
    return pm_spi_transfer(command, sizeof command, out, in, bytes);
}

static int pm_flash_until_ready(void)
{
    const uint8_t command = READ_STATUS;
    for (uint32_t poll = 0; poll < PM_FLASH_POLLS; poll++) {
        uint8_t status = 1;
        const int error = pm_spi_transfer(&command, 1, 0, &status, 1);
        if (error) return error;
        if (!(status & 1u)) return PM_OK;
    }
    return PM_ERROR_PAGE;
}

/* Changes flash by one command, and returns when that is done. After a reset of the core, or a failure, the chip may
   still be at what came before: until then it does not listen. */
static int pm_flash_change(uint8_t code, uint32_t address, const uint8_t *out, uint32_t bytes)
{
    const uint8_t enable = WRITE_ENABLE;
    int error = pm_flash_until_ready();
    if (!error) error = pm_spi_transfer(&enable, 1, 0, 0, 0);
    if (!error) error = pm_flash_command(code, address, out, 0, bytes);
    return error ? error : pm_flash_until_ready();
}

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    const int error = pm_flash_until_ready();
    return error ? error : pm_flash_command(READ, address, 0, to, bytes);
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    const uint8_t *next = from;
    while (bytes > 0) {
        const uint32_t left = PM_FLASH_PAGE - address % PM_FLASH_PAGE; /* a program command stays in its page */
        const uint32_t count = bytes < left ? bytes : left;
        int error = PM_OK;
        if (address % PM_FLASH_SECTOR == 0) error = pm_flash_change(SECTOR_ERASE, address, 0, 0);
        if (!error) error = pm_flash_change(PAGE_PROGRAM, address, next, count);
        if (error) return error;
        address += count;
        next += count;
        bytes -= count;
    }
    return PM_OK;
}
