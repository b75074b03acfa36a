/* The platform of a host with POSIX. */
#define _POSIX_C_SOURCE 200809L
#define _XOPEN_SOURCE 700

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "pm_platform.h"

int pm_file_open(const char *name, int mode)
{
    static const int flags[] = {O_RDONLY, O_RDWR | O_CREAT | O_TRUNC, O_RDWR | O_CREAT};
    return open(name, flags[mode], 0666);
}

int pm_file_seek(int file, uint32_t position)
{
    return lseek(file, (off_t)position, SEEK_SET) < 0 ? -1 : 0;
}

uint32_t pm_file_read(int file, void *to, uint32_t bytes)
{
    uint32_t done = 0;
    ssize_t moved = 1;
    while (done < bytes && moved > 0) {
        moved = read(file, (char *)to + done, bytes - done);
        done += moved > 0 ? (uint32_t)moved : 0;
    }
    return done;
}

uint32_t pm_file_write(int file, const void *from, uint32_t bytes)
{
    uint32_t done = 0;
    ssize_t moved = 1;
    while (done < bytes && moved > 0) {
        moved = write(file, (const char *)from + done, bytes - done);
        done += moved > 0 ? (uint32_t)moved : 0;
    }
    return done;
}

void pm_say(const char *text)
{
    (void)pm_file_write(STDOUT_FILENO, text, (uint32_t)strlen(text));
}

void pm_complain(const char *text)
{
    (void)pm_file_write(STDERR_FILENO, text, (uint32_t)strlen(text));
}

void pm_exit(int status)
{
    _exit(status);
}

void pm_start_clock(void)
{
}

uint32_t pm_ticks(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint32_t)(now.tv_sec * 1000000000L + now.tv_nsec);
}

static void pm_stop(int number)
{
    (void)number;
    _exit(9);
}

void pm_stop_after(uint32_t time)
{
    const struct itimerval timer = {{0, 0}, {(time_t)(time / 1000000u), (suseconds_t)(time % 1000000u)}};
    (void)signal(SIGALRM, pm_stop);
    (void)setitimer(ITIMER_REAL, &timer, 0);
}

void pm_print_figures(void)
{
}
