/* NOR flash whose power is cut, for programs that run applications on it, each in a process of its own. What includes this
   defines _GNU_SOURCE first of all, FLASH_BYTES, FLASH_UNIT, FLASH_BLOCK and OPERATION: flash is erased by blocks and programmed by
   so many bytes at a time. An operation is cut at `cut_at`: it is not done (kind 0), done in part (1), done (2), or
   leaves garbage (3), and nothing after it is done. Of kind 4 it is done in part too; so are those that fail before. */
#ifndef CUT_FLASH_H
#define CUT_FLASH_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CUT = 9, KINDS = 5, ELEMENTS = 4096 };

typedef struct {
    uint32_t operations, cut_at, kind, random;
    uint32_t fails; /* how many operations before the cut fail */
    uint32_t bad;   /* how many bytes were programmed that were not erased */
} power_t;

static power_t *power;
static unsigned char *flash;

/* Maps memory that processes share, flash and what a program notes; returns the latter, or exits. */
static void *map_flash(size_t bytes)
{
    const size_t before = ((size_t)FLASH_BYTES + 15u) / 16u * 16u, own = (sizeof *power + 15u) / 16u * 16u;
    flash = mmap(0, before + own + bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (flash == MAP_FAILED) exit(2);
    power = (power_t *)(void *)(flash + before);
    memset(flash, 0xFF, FLASH_BYTES);
    return flash + before + own;
}

static uint32_t number(void)
{
    power->random = power->random * 1664525u + 1013904223u;
    return power->random >> 8;
}

/* Bits of which so many of 20 are ones. */
static unsigned char random_byte(uint32_t ones)
{
    unsigned char byte = 0;
    for (int k = 0; k < 8; k++) byte = (unsigned char)(byte << 1 | (number() % 20u < ones));
    return byte;
}

/* Erases, or programs what `from` says; returns whether it fails. */
static int operate(uint32_t address, const unsigned char *from, uint32_t count)
{
    const uint32_t now = ++power->operations, until = power->cut_at;
    const int is_failing = now < until && now + power->fails >= until;
    const uint32_t kind = is_failing ? 4u : now == until ? power->kind : KINDS;
    const uint32_t ones = kind == 1 ? 10u : 19u;
    if (kind == 0) _exit(CUT);
    for (uint32_t k = 0; k < count; k++) {
        unsigned char *const byte = flash + address + k;
        const unsigned char set = from ? *byte & from[k] : 0xFFu;
        if (from && *byte != 0xFFu) power->bad++;
        if (kind == 3) *byte = random_byte(10);
        else if (kind != 1 && kind != 4) *byte = set;
        else *byte = from ? *byte & (from[k] | (unsigned char)~random_byte(ones)) : *byte | random_byte(ones);
    }
    if (kind < KINDS && !is_failing) _exit(CUT);
    return is_failing;
}

static int read_flash(uint32_t address, void *to, uint32_t count)
{
    if (address > FLASH_BYTES || count > FLASH_BYTES - address) abort();
    memcpy(to, flash + address, count);
    return 0;
}

/* Returns `failure` where flash fails. */
static int write_flash(uint32_t address, const void *from, uint32_t count, int failure)
{
    const unsigned char *next = from;
    if (address > FLASH_BYTES || count > FLASH_BYTES - address || address % FLASH_UNIT) abort();
    while (count) {
        const uint32_t left = OPERATION - address % OPERATION, now = count < left ? count : left;
        if (address % FLASH_BLOCK == 0 && operate(address, 0, FLASH_BLOCK)) return failure;
        if (operate(address, next, now)) return failure;
        address += now, next += now, count -= now;
    }
    return 0;
}

/* Runs an application, which exits, with a cut in an operation, or without; returns its exit status. */
static int run_cut(void (*application)(uint32_t), uint32_t argument, uint32_t cut_at, uint32_t kind)
{
    int status;
    power->operations = 0, power->cut_at = cut_at, power->kind = kind;
    const pid_t child = fork();
    if (child == 0) application(argument);
    (void)waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

#endif
