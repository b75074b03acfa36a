/* Checksums: of pages and records, and a faster one of committed state. */
#ifndef PM_CHECKSUM_H
#define PM_CHECKSUM_H

#include <stdint.h>
#include <string.h>

/* CRC-32 as in zlib: begins with 0, goes on with what it returned. */
static inline uint32_t pm_checksum(uint32_t sum, const void *data, uint32_t bytes)
{
    static const uint32_t table[16] = {
        0x00000000u, 0x1DB71064u, 0x3B6E20C8u, 0x26D930ACu, 0x76DC4190u, 0x6B6B51F4u, 0x4DB26158u, 0x5005713Cu,
        0xEDB88320u, 0xF00F9344u, 0xD6D6A3E8u, 0xCB61B38Cu, 0x9B64C2B0u, 0x86D3D2D4u, 0xA00AE278u, 0xBDBDF21Cu,
    };
    const uint8_t *byte = (const uint8_t *)data;
    sum = ~sum;
    for (uint32_t i = 0; i < bytes; i++) {
        sum ^= byte[i];
        sum = sum >> 4 ^ table[sum & 15u];
        sum = sum >> 4 ^ table[sum & 15u];
    }
    return ~sum;
}

static inline uint32_t pm_sum_word(uint32_t sum, uint32_t word)
{
    return ((sum >> 11 | sum << 21) ^ word) * 0x9E3779B1u;
}

/* Word by word, the last one filled with zeros: each step maps words, and sums, one to one, so that bits of one word
   that changed are always noticed. All but the last of the parts of a page have whole words. */
static inline uint32_t pm_sum_on(uint32_t sum, const void *data, uint32_t bytes)
{
    const uint8_t *byte = (const uint8_t *)data;
    uint32_t word;
    for (; bytes >= 32u; bytes -= 32u, byte += 32) { /* a load, an exclusive or and a product for each word */
        memcpy(&word, byte, 4u), sum = pm_sum_word(sum, word);
        memcpy(&word, byte + 4, 4u), sum = pm_sum_word(sum, word);
        memcpy(&word, byte + 8, 4u), sum = pm_sum_word(sum, word);
        memcpy(&word, byte + 12, 4u), sum = pm_sum_word(sum, word);
        memcpy(&word, byte + 16, 4u), sum = pm_sum_word(sum, word);
        memcpy(&word, byte + 20, 4u), sum = pm_sum_word(sum, word);
        memcpy(&word, byte + 24, 4u), sum = pm_sum_word(sum, word);
        memcpy(&word, byte + 28, 4u), sum = pm_sum_word(sum, word);
    }
    for (; bytes >= 4u; bytes -= 4u, byte += 4) {
        memcpy(&word, byte, 4u);
        sum = pm_sum_word(sum, word);
    }
    word = 0;
    memcpy(&word, byte, bytes);
    return bytes ? pm_sum_word(sum, word) : sum;
}

#endif
