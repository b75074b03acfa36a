/* A flash chip whose power goes: after so many transfers, in the middle of one. */
#define pm_spi_transfer chip_transfer
#include "host/spi_flash_model.c"
#undef pm_spi_transfer

int transfers_left = -1; /* negative: no end */
int transfers;

int pm_spi_transfer(const uint8_t *command, uint32_t command_bytes, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    transfers++;
    if (transfers_left == 0) return PM_ERROR_PAGE;
    if (transfers_left > 0 && --transfers_left == 0) {
        if (out) (void)chip_transfer(command, command_bytes, out, in, bytes / 2u);
        return PM_ERROR_PAGE;
    }
    return chip_transfer(command, command_bytes, out, in, bytes);
}
