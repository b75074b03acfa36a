/* The storage of generations of state in flash, because that of this board is volatile: as pages of other boards. */
#ifndef PM_FLASH_START
#define PM_FLASH_START 0u
#endif
#include <pm.h>

#ifdef ARDUINO_ARCH_ESP32
#include <../port/driver_esp_partition.c>
#else
#include <../port/driver_spi_flash.c>
#endif
