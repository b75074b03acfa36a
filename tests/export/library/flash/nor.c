#define _POSIX_C_SOURCE 200809L
#include "nor.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { REFUSED = -22, BROKEN = -5, CUT = 9 };

static unsigned long calls, written, erased;

static unsigned char *memory(void)
{
    static unsigned char *mapped;
    if (!mapped) {
        const int file = open("nor.bin", O_RDWR | O_CREAT, 0666);
        if (file < 0 || ftruncate(file, NOR_BYTES) < 0) abort(); /* zeros: not erased */
        mapped = mmap(0, NOR_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped == MAP_FAILED) abort();
    }
    return mapped;
}

const unsigned char *nor_memory(void)
{
    return memory();
}

uint32_t nor_unit(void)
{
    const char *const unit = getenv("NOR_UNIT");
    return unit ? (uint32_t)strtoul(unit, 0, 10) : 1u;
}

/* The fault of the call that begins now: 0, 'f' or 'c'. */
static char fault(void)
{
    const char *const wanted = getenv("NOR_FAULT");
    const char *const colon = wanted ? strchr(wanted, ':') : 0;
    calls++;
    return colon && strtoul(colon + 1, 0, 10) == calls ? wanted[0] : 0;
}

static int outside(size_t at, size_t bytes)
{
    return at > NOR_BYTES || bytes > NOR_BYTES - at;
}

int nor_read(size_t at, void *to, size_t bytes)
{
    const char kind = fault();
    if (outside(at, bytes)) return REFUSED;
    if (kind == 'f') return BROKEN;
    if (kind == 'c') _exit(CUT);
    memcpy(to, memory() + at, bytes);
    return 0;
}

int nor_write(size_t at, const void *from, size_t bytes)
{
    const char kind = fault();
    if (outside(at, bytes) || at % nor_unit() || bytes % nor_unit()) return REFUSED;
    if (kind == 'f') return BROKEN;
    for (size_t k = 0; k < bytes; k++) {
        if (memory()[at + k] != 0xFF) {
            fprintf(stderr, "nor: byte %zu is written without an erase\n", at + k);
            abort();
        }
    }
    written += bytes;
    memcpy(memory() + at, from, kind == 'c' ? bytes / 2 : bytes);
    if (kind == 'c') _exit(CUT);
    return 0;
}

int nor_erase(size_t at, size_t bytes)
{
    const char kind = fault();
    if (outside(at, bytes) || at % NOR_SECTOR || bytes % NOR_SECTOR) return REFUSED;
    if (kind == 'f') return BROKEN;
    erased += bytes / NOR_SECTOR;
    memset(memory() + at, 0xFF, kind == 'c' ? bytes / 2 : bytes);
    if (kind == 'c') _exit(CUT);
    return 0;
}

/* How many calls there were, for the test that lets each of them fail; what they did. */
__attribute__((destructor)) static void tell(void)
{
    fprintf(stderr, "nor_calls %lu\nnor_written %lu\nnor_erased %lu\n", calls, written, erased);
}
