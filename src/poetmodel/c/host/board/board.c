/* The platform of QEMU's mps2-an385, -an386 and -an500: files by semihosting, CMSDK timers at 25 MHz. With "-icount
   shift=0" an instruction takes 1 ns, and a tick is 40 instructions. */
#include "../pm_platform.h"

#include <string.h>

#include "../pm_text.h"
#include "board.h"
#include "semihosting.h"

typedef struct {
    volatile uint32_t control, value, reload, interrupt;
} cmsdk_timer_t;

#define CLOCK ((cmsdk_timer_t *)0x40000000u)
#define ALARM ((cmsdk_timer_t *)0x40001000u)
#define ENABLE_INTERRUPTS (*(volatile uint32_t *)0xE000E100u)
#define ALARM_INTERRUPT (1u << 9)

/* Fill value of stack bytes that no call has used. */
#define PAINT 0xA5u

extern unsigned char __stack_start[], __stack_end[], __ram_start[], __ram_used[], __ram_end[], __flash_used[];

int pm_file_open(const char *name, int mode)
{
    enum { READ_BINARY = 1, CHANGE_BINARY = 3, WRITE_BINARY = 7 };
    if (mode == PM_FILE_READ) return semihosting_open(name, READ_BINARY);
    const int file = mode == PM_FILE_KEEP ? semihosting_open(name, CHANGE_BINARY) : -1;
    return file >= 0 ? file : semihosting_open(name, WRITE_BINARY);
}

int pm_file_seek(int file, uint32_t position)
{
    return semihosting_seek(file, position);
}

uint32_t pm_file_read(int file, void *to, uint32_t bytes)
{
    const uint32_t left = semihosting_read(file, to, bytes);
    return left > bytes ? 0 : bytes - left;
}

uint32_t pm_file_write(int file, const void *from, uint32_t bytes)
{
    const uint32_t left = semihosting_write(file, from, bytes);
    return left > bytes ? 0 : bytes - left;
}

void pm_say(const char *text)
{
    static int file = -1;
    if (file < 0) file = semihosting_open(":tt", 4);
    (void)semihosting_write(file, text, (uint32_t)strlen(text));
}

void pm_complain(const char *text)
{
    static int file = -1;
    if (file < 0) file = semihosting_open(":tt", 8);
    (void)semihosting_write(file, text, (uint32_t)strlen(text));
}

void pm_exit(int status)
{
    semihosting_exit(status);
}

void pm_start_clock(void)
{
    CLOCK->control = 0;
    CLOCK->reload = 0xFFFFFFFFu;
    CLOCK->value = 0xFFFFFFFFu;
    CLOCK->control = 1;
}

uint32_t pm_ticks(void)
{
    return ~CLOCK->value;
}

void pm_stop_after(uint32_t time)
{
    ALARM->reload = time;
    ALARM->value = time;
    ALARM->control = 9; /* count, and interrupt at 0 */
    ENABLE_INTERRUPTS = ALARM_INTERRUPT;
}

void board_paint_stack(void)
{
    unsigned char *pointer;
    __asm__ volatile("mov %0, sp" : "=r"(pointer));
    for (volatile unsigned char *byte = __stack_start; byte < pointer; byte++) *byte = PAINT;
}

static void print_figure(const char *name, uint32_t value)
{
    char text[PM_TEXT_BYTES];
    pm_complain(name);
    pm_complain(pm_text_of_integer(value, text));
    pm_complain("\n");
}

void pm_print_figures(void)
{
    const unsigned char *lowest = __stack_start;
    while (lowest < __stack_end && *lowest == PAINT) lowest++;
    print_figure("ram_bytes ", (uint32_t)(__ram_used - __ram_start));
    print_figure("ram_limit_bytes ", (uint32_t)(__ram_end - __ram_start));
    print_figure("stack_bytes ", (uint32_t)(__stack_end - lowest));
    print_figure("stack_limit_bytes ", (uint32_t)(__stack_end - __stack_start));
    print_figure("flash_bytes ", (uint32_t)__flash_used);
}
