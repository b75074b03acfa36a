/* Checksums: CRC-32 of pages and records, and a faster one of committed state. */
#ifndef PM_CHECKSUM_H
#define PM_CHECKSUM_H

#include <stdint.h>
#include <string.h>

/* Returns a CRC-32 as in zlib: `sum` is 0 in the first call, and the result of the call before in each further call. */
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

static inline uint32_t pm_sum_pair(uint32_t sum, const uint8_t *data)
{
    uint32_t first, second;
    memcpy(&first, data, 4u), memcpy(&second, data + 4, 4u);
    return ((sum >> 11 | sum << 21) ^ first) * 0x9E3779B1u + second;
}

/* Continues a sum over pairs of words, the last pair padded with zeros. Each step is a bijection of either word and of
   the sums, so that changed bits within one word are always detected. All calls for a page but the last must have whole
   pairs. */
static inline uint32_t pm_sum_on(uint32_t sum, const void *data, uint32_t bytes)
{
    const uint8_t *byte = (const uint8_t *)data;
    for (; bytes >= 64u; bytes -= 64u, byte += 64) { /* two loads and two arithmetic instructions per pair */
        sum = pm_sum_pair(pm_sum_pair(sum, byte), byte + 8);
        sum = pm_sum_pair(pm_sum_pair(sum, byte + 16), byte + 24);
        sum = pm_sum_pair(pm_sum_pair(sum, byte + 32), byte + 40);
        sum = pm_sum_pair(pm_sum_pair(sum, byte + 48), byte + 56);
    }
    for (; bytes >= 8u; bytes -= 8u, byte += 8) sum = pm_sum_pair(sum, byte);
    if (bytes == 0) return sum;
    uint8_t last[8] = {0};
    memcpy(last, byte, bytes);
    return pm_sum_pair(sum, last);
}

#endif
