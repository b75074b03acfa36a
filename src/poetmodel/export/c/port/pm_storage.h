/* Storage as a row of bytes: what a driver fills in, where pm_pages.h turns slots into addresses. */
#ifndef PM_STORAGE_H
#define PM_STORAGE_H

#include <stdint.h>

/* Moves `bytes` bytes and returns PM_OK, or another number: PM_ERROR_SHORT, or PM_ERROR_PAGE, as which any other counts.
   Every write begins at a multiple of PM_STORAGE_UNIT, what flash programs at a time, and may end anywhere. It is complete
   when it returns, and a power cut in it damages no other unit: the seal of a generation is a write of its own. Where
   storage must be erased, writing the first byte of a block of PM_STORAGE_BLOCK bytes erases the whole block, and no
   other write erases anything; bytes of a block are written in rising order, whichever slots they are of, and some are
   left out. Where the core reads storage like RAM and there are no commits, a step reads a block while it writes it:
   there a write must keep all other bytes, as RAM and FRAM do. */
int pm_storage_read(uint32_t address, void *to, uint32_t bytes);
int pm_storage_write(uint32_t address, const void *from, uint32_t bytes);

/* Where a byte of storage lies for the core; only storage that it reads like RAM has this. */
const void *pm_storage_address(uint32_t address);

/* Where storage forgets without power (PM_VOLATILE), generations of state are in flash apart, of PM_COMMITTED_BYTES: the
   same of that, with units of PM_COMMIT_UNIT and blocks of PM_COMMIT_BLOCK. */
int pm_flash_read(uint32_t address, void *to, uint32_t bytes);
int pm_flash_write(uint32_t address, const void *from, uint32_t bytes);

#endif
