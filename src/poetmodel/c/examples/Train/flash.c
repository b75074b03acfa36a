/* The flash for generations of state, because the storage of this board is volatile: the drivers are those that other
   boards have for all storage. */
#ifndef PM_FLASH_START
#define PM_FLASH_START 0u
#endif
#include <pm.h>

#ifdef ARDUINO_ARCH_ESP32
#include <../port/driver_esp_partition.c>
#else
#include <../port/driver_spi_flash.c>
#endif
