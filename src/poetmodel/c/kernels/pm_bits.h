/* Bits in bytes: element number e in the order of a loop has bit e % 8 of byte e / 8. The bits after the last one
   are 0. */
#ifndef PM_BITS_H
#define PM_BITS_H

#include "pm_each.h"

/* Executes a statement for each bit of a byte. */
#define PM_EIGHT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

/* A writer of bits, from {address, 0, 1} on; pm_end_bits writes the last byte. */
typedef struct {
    uint8_t *to;
    uint32_t byte; /* bits not written yet */
    uint32_t next; /* value of the next bit in the byte: 1, 2, ..., 128 */
} pm_bit_writer;

static inline void pm_write_bit(pm_bit_writer *bits, int32_t is_set)
{
    bits->byte |= is_set ? bits->next : 0u;
    bits->next <<= 1;
    if (bits->next == 256u) {
        *bits->to++ = (uint8_t)bits->byte;
        bits->byte = 0;
        bits->next = 1;
    }
}

static inline void pm_end_bits(const pm_bit_writer *bits)
{
    if (bits->next != 1u) {
        *bits->to = (uint8_t)bits->byte;
    }
}

/* A reader of bits, from {address, 1} on. */
typedef struct {
    const uint8_t *from;
    uint32_t left; /* unread bits of a byte, below a bit that marks their end */
} pm_bit_reader;

static inline uint32_t pm_read_bit(pm_bit_reader *bits)
{
    if (bits->left == 1u) {
        bits->left = *bits->from++ | 256u;
    }
    const uint32_t bit = bits->left & 1u;
    bits->left >>= 1;
    return bit;
}

#endif
