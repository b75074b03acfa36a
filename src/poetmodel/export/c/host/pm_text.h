/* Numbers as text, without a heap: newlib's printf and strtof need one. */
#ifndef PM_TEXT_H
#define PM_TEXT_H

#include "../src/pm_real.h"

#define PM_TEXT_BYTES 32

/* Write a number to `text`, PM_TEXT_BYTES long: exactly rounded to PM_DIGITS significant digits, so that reading it
   gives the number again. Return `text`. */
const char *pm_text_of_real(pm_real value, char *text);
const char *pm_text_of_integer(uint64_t value, char *text);

/* Read a number; return 0 where the text is none. */
int pm_real_of_text(const char *text, pm_real *value);
int pm_integer_of_text(const char *text, uint32_t *value);

#endif
