/* The function of the board that driver_spi_flash.c needs. */
#ifndef PM_SPI_H
#define PM_SPI_H

#include <stdint.h>

/* Selects the chip, sends a command, then sends `bytes` bytes of `out`, or receives them to `in`, and deselects the
   chip. One of `out` and `in` is null, or both if `bytes` is 0. Returns PM_OK, or an error of pm.h. */
int pm_spi_transfer(const uint8_t *command, uint32_t command_bytes, const uint8_t *out, uint8_t *in, uint32_t bytes);

#endif
