/* Storage on serial NOR flash with the usual commands, up to 16 MiB: pages of 256 B, sectors of 4 KiB. The sectors
   of a block (PM_STORAGE_BLOCK) are erased when its first byte is written. Storage begins at PM_FLASH_START, for a
   second network or other data on the chip; the chip has PM_FLASH_BYTES. A chip whose identification is all zeros or
   all ones does not respond: this is an error, and no byte is written. */
#define PM_FLASH_DRIVER
#include "pm_pages.h"
#include "pm_spi.h"

#define PM_FLASH_PAGE 256u
#define PM_FLASH_SECTOR 4096u
#define PM_FLASH_POLLS 10000000u /* much longer than the slowest erase */

#if PM_STORAGE_BLOCK % 4096u
#error "slots on flash begin where a sector does: PM_STORAGE_BLOCK must be a multiple of 4096"
#endif

#ifndef PM_FLASH_BYTES
#define PM_FLASH_BYTES 16777216u /* range of a 3-byte address */
#endif
_Static_assert(PM_FLASH_BYTES <= 16777216u, "PM_FLASH_BYTES: this driver reaches 16 MiB");
_Static_assert(PM_FLASH_START <= PM_FLASH_BYTES &&
                   PM_STORED_BYTES <= (PM_FLASH_BYTES - PM_FLASH_START) / (sizeof(pm_real) / 4u),
               "PM_FLASH_START: storage does not fit behind it; begin it earlier, take fewer PM_GENERATIONS, or define "
               "PM_FLASH_BYTES as the size of the chip");

enum {
    PAGE_PROGRAM = 0x02,
    READ = 0x03,
    READ_STATUS = 0x05,
    WRITE_ENABLE = 0x06,
    SECTOR_ERASE = 0x20,
    READ_IDENTIFICATION = 0x9F
};

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
        if (status == 0xFFu) return PM_ERROR_PAGE; /* no chip sets all these bits: no chip drives the line */
        if (!(status & 1u)) return PM_OK;
    }
    return PM_ERROR_PAGE;
}

/* Returns PM_OK if the ready chip responds, and storage fits it, otherwise an error. In almost all chips, the third
   byte is the exponent of the size, a power of two from 64 KiB to 16 MiB. */
static int pm_flash_answers(void)
{
    const uint8_t command = READ_IDENTIFICATION;
    uint8_t id[3] = {0x00, 0xFF, 0x00}; /* neither all zeros nor all ones, if a model of a bus lacks the command */
    const int error = pm_spi_transfer(&command, 1, 0, id, sizeof id);
    if (error) return error;
    const int is_silent = id[0] == id[1] && id[1] == id[2] && (id[0] == 0x00u || id[0] == 0xFFu);
    const uint32_t size = id[2] >= 16u && id[2] <= 24u ? 1u << id[2] : PM_FLASH_BYTES;
    return is_silent || !pm_flash_holds(size) ? PM_ERROR_PAGE : PM_OK;
}

/* Changes flash by one command, and returns when that is done. First waits for an earlier command: after a reset of the
   core or a failure, the chip may still execute it, and ignores all changes until it is done. */
static int pm_flash_change(uint8_t code, uint32_t address, const uint8_t *out, uint32_t bytes)
{
    const uint8_t enable = WRITE_ENABLE;
    int error = pm_flash_until_ready();
    if (!error) error = pm_spi_transfer(&enable, 1, 0, 0, 0);
    if (!error) error = pm_flash_command(code, address, out, 0, bytes);
    return error ? error : pm_flash_until_ready();
}

/* Erases all sectors of a block: generations that share it may skip the first byte of a sector, so that no write erases
   single sectors. */
static int pm_flash_erase(uint32_t address)
{
    int error = PM_OK;
    for (uint32_t done = 0; done < PM_STORAGE_BLOCK && !error; done += PM_FLASH_SECTOR) {
        error = pm_flash_change(SECTOR_ERASE, address + done, 0, 0);
    }
    return error;
}

int pm_storage_read(uint32_t address, void *to, uint32_t bytes)
{
    int error = pm_flash_until_ready();
    if (!error) error = pm_flash_answers();
    if (!error) error = pm_flash_command(READ, PM_FLASH_START + address, 0, to, bytes);
    return error ? error : pm_flash_answers(); /* data from a failing bus differ from the written data */
}

int pm_storage_write(uint32_t address, const void *from, uint32_t bytes)
{
    const uint8_t *next = from;
    const int silent = pm_flash_until_ready() || pm_flash_answers();
    if (silent) return PM_ERROR_PAGE;
    address += PM_FLASH_START;
    while (bytes > 0) {
        const uint32_t left = PM_FLASH_PAGE - address % PM_FLASH_PAGE; /* a program command cannot cross its page */
        const uint32_t count = bytes < left ? bytes : left;
        int error = PM_OK;
        if (address % PM_STORAGE_BLOCK == 0) error = pm_flash_erase(address);
        if (!error) error = pm_flash_change(PAGE_PROGRAM, address, next, count);
        if (error) return error;
        address += count;
        next += count;
        bytes -= count;
    }
    return pm_flash_answers();
}
