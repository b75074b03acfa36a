/* Where generations of state go, as the storage of this board forgets them: as the pages of other boards. */
#ifndef PM_FLASH_START
#define PM_FLASH_START 0u
#endif
#include <pm.h>

#ifdef ARDUINO_ARCH_ESP32
#include <../port/driver_esp_partition.c>
#else
#include <../port/driver_spi_flash.c>
#endif
