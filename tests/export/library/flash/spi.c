/* A chip on a bus that counts what it is told, under the names of the other flash of tests. What it holds is in a file;
   NOR_FAULT=cut:3 lets the power go in the middle of the third transfer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define pm_spi_transfer chip_transfer
#include "host/spi_flash_model.c"
#undef pm_spi_transfer

enum { KEPT = 1 << 20, CUT = 9 };

static unsigned long calls, written, erased;

__attribute__((constructor)) static void load(void)
{
    FILE *const file = fopen("chip.bin", "rb");
    if (!file) return;
    if (fread(chip, 1, KEPT, file) != KEPT) abort();
    fclose(file);
}

static void save(void)
{
    FILE *const file = fopen("chip.bin", "wb");
    if (!file || fwrite(chip, 1, KEPT, file) != KEPT) abort();
    fclose(file);
}

int pm_spi_transfer(const uint8_t *command, uint32_t command_bytes, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    const char *const fault = getenv("NOR_FAULT");
    calls++;
    erased += command[0] == 0x20;
    written += command[0] == 0x02 ? bytes : 0u;
    if (fault && strncmp(fault, "cut:", 4) == 0 && strtoul(fault + 4, 0, 10) == calls) {
        if (out) (void)chip_transfer(command, command_bytes, out, in, bytes / 2u);
        save();
        _exit(CUT);
    }
    return chip_transfer(command, command_bytes, out, in, bytes);
}

__attribute__((destructor)) static void tell(void)
{
    save();
    fprintf(stderr, "nor_calls %lu\nnor_written %lu\nnor_erased %lu\n", calls, written, erased);
}
