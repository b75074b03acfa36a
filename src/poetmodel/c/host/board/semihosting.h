/* Requests of a program on a board to its emulator. */
#ifndef SEMIHOSTING_H
#define SEMIHOSTING_H

#include <stdint.h>

int semihosting_open(const char *name, uint32_t mode); /* negative if the file cannot be opened */
int semihosting_seek(int file, uint32_t position); /* negative if it fails */
uint32_t semihosting_read(int file, void *to, uint32_t bytes);          /* number of bytes not transferred */
uint32_t semihosting_write(int file, const void *from, uint32_t bytes); /* number of bytes not transferred */
int semihosting_command_line(char *text, uint32_t bytes); /* 0, or another number if it fails */
void semihosting_complain(const char *text);
_Noreturn void semihosting_exit(int status);

#endif
