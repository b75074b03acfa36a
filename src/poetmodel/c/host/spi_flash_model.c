/* A model of a serial NOR flash chip, for hosts and emulators: programming only clears bits, a program command wraps
   around within its page, changes need the write-enable latch, and a busy chip executes only "read status". */
#include <string.h>

#include "../port/pm_spi.h"
#include "pm.h"

#ifdef __arm__
#define PM_EXTERNAL __attribute__((section(".storage")))
#else
#define PM_EXTERNAL
#endif

#define CHIP_BYTES 8388608u /* a power of two: addresses wrap around */
#define BUSY_POLLS 3u

static uint8_t chip[CHIP_BYTES] PM_EXTERNAL; /* not erased at first */
static const uint8_t identification[3] = {0xEF, 0x40, 0x17}; /* of a W25Q64, which has CHIP_BYTES */
static uint32_t busy;
static uint8_t latch;

static uint8_t status(void)
{
    const uint8_t now = (uint8_t)((busy ? 1u : 0u) | (latch ? 2u : 0u));
    if (busy) busy--;
    return now;
}

static void change(uint8_t code, uint32_t address, const uint8_t *out, uint32_t bytes)
{
    if (!latch) return;
    if (code == 0x20) {
        memset(chip + (address & ~4095u), 0xFF, 4096u);
    } else {
        const uint32_t page = address & ~255u;
        for (uint32_t i = 0; i < bytes; i++) chip[page | ((address + i) & 255u)] &= out[i];
    }
    latch = 0;
    busy = BUSY_POLLS;
}

int pm_spi_transfer(const uint8_t *command, uint32_t command_bytes, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    const uint8_t code = command[0];
    uint32_t address = 0;
    for (uint32_t i = 1; i < command_bytes; i++) address = address << 8 | command[i];
    address &= CHIP_BYTES - 1u;
    if (in) memset(in, 0xFF, bytes);
    if (code == 0x05) {
        for (uint32_t i = 0; i < bytes; i++) in[i] = status();
    } else if (busy) {
        return PM_OK; /* the busy chip ignores commands, without an error */
    } else if (code == 0x9F) {
        for (uint32_t i = 0; i < bytes && i < sizeof identification; i++) in[i] = identification[i];
    } else if (code == 0x06) {
        latch = 1;
    } else if (code == 0x03) {
        for (uint32_t i = 0; i < bytes; i++) in[i] = chip[(address + i) & (CHIP_BYTES - 1u)];
    } else if (code == 0x02 || code == 0x20) {
        change(code, address, out, bytes);
    }
    return PM_OK;
}
