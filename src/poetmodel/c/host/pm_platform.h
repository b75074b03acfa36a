/* The platform of pm_run and the file drivers: a host (pm_host.c) or an emulated board (board/). */
#ifndef PM_PLATFORM_H
#define PM_PLATFORM_H

#include <stdint.h>

#define PM_FILE_READ 0
#define PM_FILE_WRITE 1 /* empty at first */
#define PM_FILE_KEEP 2  /* opens for reads and writes; creates a missing file */

int pm_file_open(const char *name, int mode); /* negative if it cannot be opened */
int pm_file_seek(int file, uint32_t position); /* negative if it fails */
uint32_t pm_file_read(int file, void *to, uint32_t bytes); /* number of bytes transferred */
uint32_t pm_file_write(int file, const void *from, uint32_t bytes);

void pm_say(const char *text);      /* to standard output */
void pm_complain(const char *text); /* to standard error */
_Noreturn void pm_exit(int status);

/* A clock. On the emulated board, pm_start_clock sets it to 0, and a tick is PM_TICK instructions; on a host it counts
   nanoseconds, modulo 2^32, and pm_start_clock does nothing. */
#define PM_TICK 40u
void pm_start_clock(void);
uint32_t pm_ticks(void);

/* Ends the program with status 9 after a time, at any instruction: ticks on a board, microseconds on a host. */
void pm_stop_after(uint32_t time);

/* From driver_nor.c: the ticks of its writes, which a caller may reset, and a print of its counters since the start. */
extern uint32_t pm_storage_ticks;
void pm_print_wear(void);

void pm_print_figures(void); /* metrics of a board: RAM, stack and flash */

#endif
