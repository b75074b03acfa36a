/* Storage that goes wrong on purpose: driver_faults.c. */
#ifndef PM_FAULTS_H
#define PM_FAULTS_H

#include <stdint.h>

/* At which call, counted from 1, what goes wrong. fail: nothing is moved; short: half is; both return an error, and
   count all calls. old: a write is lost; empty: a read leaves memory as it was; flip: a bit of what is read is wrong;
   cut: the power goes in the middle of a write (status 9). These count reads, or writes. */
int pm_set_fault(const char *kind, uint32_t call);

/* What functions of pm_storage.h do, but for what goes wrong. */
int pm_faulty_read(int (*read)(uint32_t, void *, uint32_t), uint32_t address, void *to, uint32_t bytes);
int pm_faulty_write(int (*write)(uint32_t, const void *, uint32_t), uint32_t address, const void *from, uint32_t bytes);

extern uint32_t pm_reads, pm_writes; /* calls until now */

#endif
