/* Code from reset to main, and its end: faults end the emulation with status 3, the alarm of pm_stop_after with 9. */
#include <stdint.h>
#include <string.h>

#include "board.h"
#include "semihosting.h"

extern uint32_t __handler_stack_end[], __stack_start[], __stack_end[];
extern unsigned char __data_load[], __data_start[], __data_end[], __bss_start[], __bss_end[];
extern unsigned char __aside_start[], __aside_end[];

int main(int argc, char **argv);
void reset(void);
void start(void);

/* In place of newlib's version, which needs a kilobyte of data. */
int *__errno(void);
int *__errno(void)
{
    static int number;
    return &number;
}

static void fault(void)
{
    semihosting_complain("pm_run: the core met a fault, perhaps because the stack is full; export with a larger "
                         "--stack\n");
    semihosting_exit(3);
}

static void alarm(void)
{
    semihosting_exit(9);
}

/* Handlers have a separate stack, so that they can be executed if that of the program is full. */
__attribute__((naked)) void reset(void)
{
    __asm__ volatile("ldr r0, =__stack_end\n msr psp, r0\n movs r0, #2\n msr control, r0\n isb\n b start\n");
}

#define CPACR (*(volatile uint32_t *)0xE000ED88u)
#define MPU ((volatile uint32_t *)0xE000ED90u) /* type, control, number, base, attributes and size */

/* Makes accesses to the megabyte below RAM a fault, so that a stack overflow, which reaches it, is detected. */
static void guard_stack(void)
{
    MPU[2] = 0;
    MPU[3] = (uint32_t)__stack_start - 0x100000u;
    MPU[4] = 19u << 1 | 1u; /* 2^20 bytes, no access */
    MPU[1] = 5u;            /* enabled; all other addresses as without it */
    __asm__ volatile("dsb\n isb\n");
}

static int split(char *text, char **words, int room)
{
    int count = 0;
    while (*text && count < room) {
        while (*text == ' ') *text++ = 0;
        if (!*text) break;
        words[count++] = text;
        while (*text && *text != ' ') text++;
    }
    return count;
}

/* Called by the assembly of reset only, which link-time optimization cannot see. */
__attribute__((used)) void start(void)
{
    /* In a section outside of the RAM of the device, which is cleared below. */
    static char line[1024] __attribute__((section(".measure")));
    static char *words[16] __attribute__((section(".measure")));
#ifdef __ARM_FP
    CPACR |= 0xFu << 20; /* enable the floating-point unit before its first use */
    __asm__ volatile("dsb\n isb\n");
#endif
    guard_stack();
    board_paint_stack();
    memcpy(__data_start, __data_load, (size_t)(__data_end - __data_start));
    memset(__bss_start, 0, (size_t)(__bss_end - __bss_start));
    memset(__aside_start, 0, (size_t)(__aside_end - __aside_start));
    if (semihosting_command_line(line, sizeof line - 1u) != 0) semihosting_exit(3);
    semihosting_exit(main(split(line, words, 16), words));
}

typedef void handler_t(void);

__attribute__((used, section(".vectors"))) static const struct {
    uint32_t *stack;
    handler_t *handlers[15];
    handler_t *interrupts[10];
} vectors = {
    __handler_stack_end,
    {reset, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault},
    {fault, fault, fault, fault, fault, fault, fault, fault, fault, alarm},
};
