/* Where the pages of the sketch go: on an ESP32 to a partition of its flash, else to a flash chip on the SPI bus. */
#include <pm.h>

#if defined(ARDUINO_ARCH_ESP32) && (!PM_MAPPED || PM_COMMIT)
#include <../port/driver_esp_partition.c>
#elif PM_MAPPED
/* The core reads its pages where they lie, and a step changes them byte by byte: memory. */
#include <../port/driver_ram.c>
#else
#include <../port/driver_spi_flash.c>
#endif
