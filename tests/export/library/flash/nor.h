/* NOR flash as a test has it: a file of this machine. Erasing sets the bits of whole sectors; writing begins and ends
   where a unit does, in a place that was erased since it was written last. Who breaks a rule of the second kind ends
   the program, for no chip would tell. */
#ifndef NOR_H
#define NOR_H

#include <stddef.h>
#include <stdint.h>

#ifndef NOR_BYTES
#define NOR_BYTES (1024u * 1024u)
#endif
#define NOR_SECTOR 4096u

/* NOR_UNIT=8 is the unit. NOR_FAULT=fail:7 lets the seventh call fail before it has done anything; cut:7 lets the power
   go in the middle of it: what the call should change is changed by half, and the program ends with status 9. */
int nor_read(size_t at, void *to, size_t bytes);
int nor_write(size_t at, const void *from, size_t bytes);
int nor_erase(size_t at, size_t bytes);
uint32_t nor_unit(void);
const unsigned char *nor_memory(void);

#endif
