/* The storage of the sketch: on an ESP32 a partition of its flash, otherwise a flash chip on the SPI bus. Other data
   on it, such as the state of a second network, must be before PM_FLASH_START, a multiple of 4096. */
#ifndef PM_FLASH_START
#define PM_FLASH_START 0u
#endif
#include <pm.h>

#if PM_VOLATILE /* memory: its address is PM_STORAGE_ADDRESS, or its section PM_STORAGE_SECTION; see flash.c */
#include <../port/driver_ram.c>
#elif defined(ARDUINO_ARCH_ESP32) && (!PM_MAPPED || PM_COMMIT)
#include <../port/driver_esp_partition.c>
#elif !PM_MAPPED
#include <../port/driver_spi_flash.c>
#elif defined(PM_KEEP_IN_RAM)
#include <../port/driver_ram.c>
#else
#error "the core reads these pages where they lie: write the functions of port/pm_storage.h for the memory of this board here, or define PM_KEEP_IN_RAM for RAM, which forgets them"
#endif
