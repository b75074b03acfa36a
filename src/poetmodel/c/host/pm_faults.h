/* Fault injection for storage: driver_faults.c. */
#ifndef PM_FAULTS_H
#define PM_FAULTS_H

#include <stdint.h>

/* Sets the call, counted from 1, at which a fault occurs; returns PM_ERROR_INDEX for an unknown kind. fail: no bytes
   are transferred; short: half of them are; both return an error, and count all calls. old: a write is lost; cut: a
   power cut in the middle of a write (status 9); both count writes. empty: a read leaves memory unchanged; flip: a
   read has one wrong bit; both count reads. */
int pm_set_fault(const char *kind, uint32_t call);

/* Call `read` or `write`, a function of pm_storage.h, with the fault if this is its call; return the result. */
int pm_faulty_read(int (*read)(uint32_t, void *, uint32_t), uint32_t address, void *to, uint32_t bytes);
int pm_faulty_write(int (*write)(uint32_t, const void *, uint32_t), uint32_t address, const void *from, uint32_t bytes);

extern uint32_t pm_reads, pm_writes; /* number of calls so far */

#endif
