/* A chip on a bus that counts what it is told, under the names of the other flash of tests. */
#include <stdio.h>

#define pm_spi_transfer chip_transfer
#include "host/spi_flash_model.c"
#undef pm_spi_transfer

static unsigned long calls, written, erased;

int pm_spi_transfer(const uint8_t *command, uint32_t command_bytes, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    calls++;
    erased += command[0] == 0x20;
    written += command[0] == 0x02 ? bytes : 0u;
    return chip_transfer(command, command_bytes, out, in, bytes);
}

__attribute__((destructor)) static void tell(void)
{
    fprintf(stderr, "nor_calls %lu\nnor_written %lu\nnor_erased %lu\n", calls, written, erased);
}
