/* Fault injection for storage: driver_faults.c. */
#ifndef PM_FAULTS_H
#define PM_FAULTS_H

#include <stdint.h>

/* The call, counted from 1, at which a fault occurs. fail: no bytes are transferred; short: half of them are; both
   return an error, and count all calls. old: a write is lost; empty: a read leaves memory unchanged; flip: a read
   has one wrong bit; cut: a power cut in the middle of a write (status 9). These count reads, or writes. */
int pm_set_fault(const char *kind, uint32_t call);

/* The functions of pm_storage.h, without faults. */
int pm_faulty_read(int (*read)(uint32_t, void *, uint32_t), uint32_t address, void *to, uint32_t bytes);
int pm_faulty_write(int (*write)(uint32_t, const void *, uint32_t), uint32_t address, const void *from, uint32_t bytes);

extern uint32_t pm_reads, pm_writes; /* number of calls so far */

#endif
