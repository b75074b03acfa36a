/* Updates of state on memory-mapped storage: part by part, each copied to the stack, changed there and written.

   Commits write tensors one after the other: then each turn computes the whole update from the old values, and writes
   one piece; the last turn writes all further ones, which are in RAM. */
#include "pm_state.h"

/* The entries of the table. */
enum { ROWS, UNITS, MOST, UNIT, WRITE, TURNS, WRITTEN, PIECES, FIRST_PIECE };

/* Writes `count` elements of each piece of the turn from its copy, from element `from` of that on; or, if `reads`,
   copies those of all pieces there. A piece of one element has the same in each part. */
__attribute__((noinline)) static int move(const pm_mapped_t *update, int32_t from, int32_t count, int reads)
{
    const int32_t *const table = update->table;
    const int32_t pieces = table[reads ? PIECES : WRITTEN];
    for (int32_t k = 0; k < pieces; k++) {
        const pm_piece_t *const piece = &pm_pieces[table[FIRST_PIECE + k]];
        const pm_buffer_t *const buffer = &pm_buffers[piece->buffer];
        const uint32_t size = pm_size_of(buffer->type);
        const int moves = piece->elements > 1u;
        const uint32_t begin = (piece->offset + (moves ? (uint32_t)(update->at + from) : 0u)) * size;
        const uint32_t bytes = (moves ? (uint32_t)count : 1u) * size;
        pm_real *const copy = update->copies + k * table[WRITE] + from;
        unsigned char *const home = PM_ADDRESS(buffer->address);
        if (reads) {
            const unsigned char *const old = buffer->home == PM_RAM ? home : pm_page_address(pm_old_slot(buffer));
            memcpy(copy, old + begin, bytes);
        } else if (PM_MIN(k, table[TURNS] - 1) != update->turn) {
            continue;
        } else if (buffer->home == PM_RAM) {
            memcpy(home + begin, copy, bytes);
        } else {
            PM_TRY(pm_page_write(pm_new_slot(buffer), begin, copy, bytes));
        }
    }
    return PM_OK;
}

int pm_mapped_next(pm_mapped_t *update)
{
    const int32_t *const table = update->table;
    update->held += update->n * table[UNIT];
    update->first += update->n;
    if (update->first == table[UNITS]) {
        update->first = 0;
        update->row++;
    }
    const int is_end = update->row == table[ROWS];
    int32_t done = 0;
    while (update->held - done >= table[WRITE] || (is_end && update->held > done)) {
        const int32_t count = PM_MIN(update->held - done, table[WRITE]);
        update->error = move(update, done, count, 0);
        if (update->error) return 0;
        done += count;
    }
    update->at += done;
    update->held -= done;
    if (done) memcpy(update->copies, update->copies + done, (size_t)update->held * sizeof(pm_real)); /* less than a write */
    if (is_end) {
        update->row = update->at = 0;
        if (++update->turn == table[TURNS]) return 0;
    }
    const int32_t n = PM_MIN(table[UNITS] - update->first, table[MOST]);
    (void)move(update, update->held, n * table[UNIT], 1);
    update->n = n;
    return 1;
}
