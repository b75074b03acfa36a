/* The number type of a step: float, or double with -DPM_REAL=double everywhere. */
#ifndef PM_REAL
#define PM_REAL float
#endif
typedef PM_REAL pm_real;

/* The return values of the functions of a step and of a driver. */
#define PM_OK 0
#define PM_TORN 1           /* a driver failed after the first update: state is partly new */
#define PM_ERROR_PAGE 2     /* a transfer or an erase on storage failed */
#define PM_ERROR_SHORT 3    /* storage transferred fewer bytes than requested */
#define PM_ERROR_SLOT 4     /* the slot does not exist or is smaller than the transfer */
#define PM_ERROR_CHECKSUM 5 /* the content of a page has changed since it was written */
#define PM_ERROR_BUSY 6     /* a slot was used during its transfer, or state was used during a step */
#define PM_ERROR_INDEX 7    /* the tensor or the elements do not exist */
#define PM_ERROR_EMPTY 8    /* storage was read completely and has no generation */
#define PM_READ_ONLY 9      /* the tensor is in flash, and no step changes it */
#define PM_MORE 10          /* no error: the step has further slices */
#define PM_ERROR_IDLE 11    /* no step was begun */
#define PM_ERROR_ARENA 12   /* the arena is missing, too small or not aligned */
#define PM_RESUMED_OLDER 13 /* no error: the newest generation is damaged, and the one before was loaded */
#define PM_ERROR_INPUT 14   /* an index of the data, such as a label, is outside its range */
#define PM_ERROR_NUMBER 15  /* an input, the loss or the learning rate is not finite; no state was updated */
#define PM_ERROR_OTHER 16   /* storage has state of another step, instance or layout */
#define PM_ERROR_STATE 17   /* no valid state: call pm_init or pm_resume first, also after PM_TORN */

/* Number and type of the elements of an input, a state tensor or a gradient. */
typedef struct {
    uint32_t elements;
    uint32_t integer_bytes; /* size of an integer element [bytes]; 0 for pm_real */
} pm_tensor_t;

extern const pm_tensor_t pm_inputs_info[];
extern const pm_tensor_t pm_states_info[];
extern const pm_tensor_t pm_gradients_info[];

/* The storage driver of a step, needed unless PM_SLOTS is 0: one of the drivers in port/, or functions of the
   application. Slots have pm_slot_bytes[slot] bytes, and twice that in a build for double. The last PM_STATE_SLOTS
   entries of that table are one generation of committed state, in the order in which a step writes it. The slots of
   the other generations follow, with the same sizes. The first slot of each generation is its record and the last
   one its seal: PM_RECORD_BYTES and PM_SEAL_BYTES in every build. On flash, a record is at the beginning of an erase
   block or, if several generations share a block, of a page of 256 bytes in it; a seal fills a separate write unit. */
extern const uint32_t pm_slot_bytes[];
#define PM_RECORD_BYTES 32u
#define PM_SEAL_BYTES 8u

/* Start to write `bytes` bytes to a slot, or to read them from it; return PM_OK or an error. The driver uses the memory
   until the wait returns: until then, memory at `from` must not be changed, and memory at `to` not be read. A slot has
   at most one transfer at a time; several slots may have one each. */
int pm_page_out(uint32_t slot, const void *from, uint32_t bytes);
int pm_page_in(uint32_t slot, void *to, uint32_t bytes);

/* Waits for the transfer of a slot, and returns its result, PM_OK or an error; the call that started the transfer may
   have returned the error already. A driver with blocking transfers returns PM_OK. */
int pm_page_wait(uint32_t slot);

/* For pm_migrate (PM_MIGRATES), on the storage of generations. pm_old_read and pm_old_write transfer bytes at an
   address, and return PM_OK or an error. pm_old_place sets the first address of a place for generations of this step
   (PM_PLACES) or, after these, for groups of stored samples (PM_GROUPS), and the end of its last erase block. pm_old_unit returns the alignment of tensors of the other step,
   and pm_old_end the size of storage [bytes]. */
int pm_old_read(uint32_t address, void *to, uint32_t bytes);
int pm_old_write(uint32_t address, const void *from, uint32_t bytes);
void pm_old_place(uint32_t place, uint32_t *begin, uint32_t *end);
uint32_t pm_old_unit(void);
uint32_t pm_old_end(void);

/* For stored samples (PM_REPLAY): slots from PM_SLOTS on are PM_GROUPS groups of samples, each in separate erase
   blocks. pm_page_read and pm_page_write (below) transfer bytes at an offset in a slot, and return PM_OK or an error
   when done. Writes to a group have increasing offsets, and may skip bytes. */
int pm_page_read(uint32_t slot, uint32_t offset, void *to, uint32_t bytes);

/* For memory-mapped storage (PM_MAPPED): the address of a slot, or 0 if it has none; a blocking write of some of its bytes, with commits
   all of them at increasing offsets; and, for committed state with checksums (PM_STATE_SUMS), a check of all bytes
   of a slot that returns PM_OK, PM_ERROR_CHECKSUM or another error. */
const void *pm_page_address(uint32_t slot);
int pm_page_write(uint32_t slot, uint32_t offset, const void *from, uint32_t bytes);
int pm_page_check(uint32_t slot);
