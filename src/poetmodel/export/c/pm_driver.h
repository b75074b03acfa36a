/* The number type of a step: float, or double with -DPM_REAL=double everywhere. */
#ifndef PM_REAL
#define PM_REAL float
#endif
typedef PM_REAL pm_real;

/* What the functions of a step and of a driver return. */
#define PM_OK 0
#define PM_TORN 1           /* a driver failed after the first update: part of the state is new */
#define PM_ERROR_PAGE 2     /* storage did not do what it was asked */
#define PM_ERROR_SHORT 3    /* storage moved fewer bytes than it was asked */
#define PM_ERROR_SLOT 4     /* no such slot, or more bytes than it has */
#define PM_ERROR_CHECKSUM 5 /* a page is not what was written */
#define PM_ERROR_BUSY 6     /* a slot was used while a transfer of it was under way, or state while a step was */
#define PM_ERROR_INDEX 7    /* no such tensor, or fewer elements than asked for */
#define PM_ERROR_EMPTY 8    /* storage has no generation of any state: all of it was read */
#define PM_READ_ONLY 9      /* a tensor that no step changes, and that lies in flash */
#define PM_MORE 10          /* no error: the step goes on with the next slice */
#define PM_ERROR_IDLE 11    /* no step has begun */
#define PM_ERROR_ARENA 12   /* no arena was given, or one too small or not aligned */
#define PM_RESUMED_OLDER 13 /* no error: the newest generation is damaged, state is that of the one before */
#define PM_ERROR_INPUT 14   /* an index of the data, such as a label, is outside its range */
#define PM_ERROR_NUMBER 15  /* the loss is not finite: the step has updated nothing */
#define PM_ERROR_OTHER 16   /* storage has state of another program, or of another instance of this one */
#define PM_ERROR_STATE 17   /* there is no state: pm_init and pm_resume have not succeeded, or a step was torn since */

/* A tensor as callers see it. */
typedef struct {
    uint32_t elements;
    uint32_t integer_bytes; /* of an element; 0: it is a pm_real */
} pm_tensor_t;

extern const pm_tensor_t pm_inputs_info[];
extern const pm_tensor_t pm_states_info[];
extern const pm_tensor_t pm_gradients_info[];

/* What a step asks of storage, where PM_SLOTS is not 0: these functions come from one of the drivers in port/, or from
   the application. Slots have pm_slot_bytes[slot] bytes, and twice that in a build for double. The last PM_STATE_SLOTS
   of that table are one generation of committed state, in the order in which a step writes it; those of the other
   generations follow, with the same bytes. The first one of each is its record and the last one its seal:
   PM_RECORD_BYTES and PM_SEAL_BYTES in every build. On flash a record lies where an erase block begins, and a seal has a
   write unit of its own. */
extern const uint32_t pm_slot_bytes[];
#define PM_RECORD_BYTES 32u
#define PM_SEAL_BYTES 8u

/* Begins to write `bytes` bytes to a slot, to read them from it. The memory may be changed, or read, after the wait
   only. At most one transfer of a slot is under way; transfers of several slots may be. */
int pm_page_out(uint32_t slot, const void *from, uint32_t bytes);
int pm_page_in(uint32_t slot, void *to, uint32_t bytes);

/* Returns when the transfer of a slot is done, and says how it went; an error may be said here or by the call that
   began it. A driver that blocks the core returns 0. */
int pm_page_wait(uint32_t slot);

/* Where pm_migrate is (PM_MIGRATES): storage of generations by addresses, and which of them a place has; what tensors of the
   other step begin at multiples of; where storage ends. */
int pm_old_read(uint32_t address, void *to, uint32_t bytes);
int pm_old_write(uint32_t address, const void *from, uint32_t bytes);
void pm_old_place(uint32_t place, uint32_t *begin, uint32_t *end);
uint32_t pm_old_unit(void);
uint32_t pm_old_end(void);

/* Where samples are stored (PM_REPLAY): slots from PM_SLOTS on are PM_GROUPS groups of them, in blocks of their own, which
   these calls read and write at an offset, done on return; writes are in rising order, and some bytes are left out. */
int pm_page_read(uint32_t slot, uint32_t offset, void *to, uint32_t bytes);

/* Storage that the core reads like RAM (PM_MAPPED): where a slot begins; writing some of its bytes, done on return, with
   commits all of them in rising order; and, where committed state has checksums (PM_STATE_SUMS), PM_OK or
   PM_ERROR_CHECKSUM for all of a slot. */
const void *pm_page_address(uint32_t slot);
int pm_page_write(uint32_t slot, uint32_t offset, const void *from, uint32_t bytes);
int pm_page_check(uint32_t slot);
