#include "semihosting.h"

#include <string.h>

enum { OPEN = 0x01, WRITE0 = 0x04, WRITE = 0x05, READ = 0x06, SEEK = 0x0A, COMMAND_LINE = 0x15, EXIT_EXTENDED = 0x20 };

static uint32_t request(uint32_t operation, const volatile void *arguments)
{
    register uint32_t r0 __asm__("r0") = operation;
    register const volatile void *r1 __asm__("r1") = arguments;
    __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

int semihosting_open(const char *name, uint32_t mode)
{
    const volatile uint32_t block[3] = {(uint32_t)name, mode, (uint32_t)strlen(name)};
    return (int)request(OPEN, block);
}

int semihosting_seek(int file, uint32_t position)
{
    const volatile uint32_t block[2] = {(uint32_t)file, position};
    return (int)request(SEEK, block);
}

uint32_t semihosting_read(int file, void *to, uint32_t bytes)
{
    const volatile uint32_t block[3] = {(uint32_t)file, (uint32_t)to, bytes};
    return request(READ, block);
}

uint32_t semihosting_write(int file, const void *from, uint32_t bytes)
{
    const volatile uint32_t block[3] = {(uint32_t)file, (uint32_t)from, bytes};
    return request(WRITE, block);
}

int semihosting_command_line(char *text, uint32_t bytes)
{
    const volatile uint32_t block[2] = {(uint32_t)text, bytes};
    return (int)request(COMMAND_LINE, block);
}

void semihosting_complain(const char *text)
{
    (void)request(WRITE0, text);
}

void semihosting_exit(int status)
{
    const volatile uint32_t block[2] = {0x20026u, (uint32_t)status}; /* the program ended, with a status */
    for (;;) (void)request(EXIT_EXTENDED, block);
}
