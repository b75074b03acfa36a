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
#define PM_ERROR_NUMBER 15  /* the loss is not finite; no state was updated */
#define PM_ERROR_OTHER 16   /* storage has state of another step, instance or layout */
#define PM_ERROR_STATE 17   /* no valid state: call pm_init or pm_resume first, also after PM_TORN */

/* Size and type of an input, state tensor or gradient. */
typedef struct {
    uint32_t elements;
    uint32_t integer_bytes; /* size of an integer element; 0 for pm_real */
} pm_tensor_t;

extern const pm_tensor_t pm_inputs_info[];
extern const pm_tensor_t pm_states_info[];
extern const pm_tensor_t pm_gradients_info[];

/* The storage driver of a step, needed unless PM_SLOTS is 0: one of the drivers in port/, or functions of the
   application. Slots have pm_slot_bytes[slot] bytes, and twice that in a build for double. The last PM_STATE_SLOTS
   entries of that table are one generation of committed state, in the order in which a step writes it. The slots of
   the other generations follow, with the same sizes. The first slot of each generation is its record and the last
   one its seal: PM_RECORD_BYTES and PM_SEAL_BYTES in every build. On flash, a record is at the beginning of an erase
   block, and a seal fills a separate write unit. */
extern const uint32_t pm_slot_bytes[];
#define PM_RECORD_BYTES 32u
#define PM_SEAL_BYTES 8u

/* Start to write `bytes` bytes to a slot, or to read them from it. The memory must not be changed, or read, before
   the wait returns. A slot has at most one transfer at a time; several slots may have one each. */
int pm_page_out(uint32_t slot, const void *from, uint32_t bytes);
int pm_page_in(uint32_t slot, void *to, uint32_t bytes);

/* Waits for the transfer of a slot, and returns its result; errors may also be returned by the call that started it.
   A driver with blocking transfers returns 0. */
int pm_page_wait(uint32_t slot);

/* For pm_migrate (PM_MIGRATES): reads and writes of generations by address, the generation at an address, the
   alignment of tensors of the other step, and the end of storage. */
int pm_old_read(uint32_t address, void *to, uint32_t bytes);
int pm_old_write(uint32_t address, const void *from, uint32_t bytes);
void pm_old_place(uint32_t place, uint32_t *begin, uint32_t *end);
uint32_t pm_old_unit(void);
uint32_t pm_old_end(void);

/* For stored samples (PM_REPLAY): slots from PM_SLOTS on are PM_GROUPS groups of samples, each in separate erase
   blocks. These calls read and write at an offset and block until done. Writes have increasing offsets, and may skip
   bytes. */
int pm_page_read(uint32_t slot, uint32_t offset, void *to, uint32_t bytes);

/* For memory-mapped storage (PM_MAPPED): the address of a slot; a blocking write of some of its bytes, with commits
   all of them at increasing offsets; and, for committed state with checksums (PM_STATE_SUMS), a check of all bytes
   of a slot that returns PM_OK or PM_ERROR_CHECKSUM. */
const void *pm_page_address(uint32_t slot);
int pm_page_write(uint32_t slot, uint32_t offset, const void *from, uint32_t bytes);
int pm_page_check(uint32_t slot);
