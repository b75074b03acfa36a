/* Byte-addressed storage: the functions of a driver, to which pm_pages.h maps slots. */
#ifndef PM_STORAGE_H
#define PM_STORAGE_H

#include <stdint.h>

/* Transfer `bytes` bytes and return PM_OK or an error: PM_ERROR_SHORT or PM_ERROR_PAGE; all other numbers count as
   PM_ERROR_PAGE. Every write begins at a multiple of PM_STORAGE_UNIT, the write unit of flash, and may end anywhere.
   It is complete when it returns, and a power cut during it damages no other unit: the seal of a generation is a
   separate write. If storage must be erased, a write to the first byte of a block of PM_STORAGE_BLOCK bytes erases
   the whole block, and no other write erases. Bytes of a block are written in increasing order, across slots, and
   may be skipped. If storage is memory-mapped, without commits, a step reads a block while it writes it: a write
   must then preserve all other bytes, as RAM and FRAM do. */
int pm_storage_read(uint32_t address, void *to, uint32_t bytes);
int pm_storage_write(uint32_t address, const void *from, uint32_t bytes);

/* Returns the pointer with which the core reads a byte of storage, or 0 on an error; memory-mapped storage only. */
const void *pm_storage_address(uint32_t address);

/* If storage is volatile (PM_VOLATILE), generations of state and stored samples are in separate flash, of
   PM_COMMITTED_BYTES + PM_REPLAY_BYTES, twice that in a build for double. The same functions for this flash, with units
   of PM_COMMIT_UNIT and blocks of PM_COMMIT_BLOCK. */
int pm_flash_read(uint32_t address, void *to, uint32_t bytes);
int pm_flash_write(uint32_t address, const void *from, uint32_t bytes);

#endif
