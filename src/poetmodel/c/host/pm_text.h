/* Conversion between numbers and text without a heap, which newlib's printf and strtof need. */
#ifndef PM_TEXT_H
#define PM_TEXT_H

#include "../src/pm_real.h"

#define PM_TEXT_BYTES 32

/* Write a number to `text`, PM_TEXT_BYTES long: correctly rounded to PM_DIGITS significant digits, so that parsing
   returns the same number. Return `text`. */
const char *pm_text_of_real(pm_real value, char *text);
const char *pm_text_of_integer(uint64_t value, char *text);

/* Parse a number, and return 1; return 0 if the text is invalid. */
int pm_real_of_text(const char *text, pm_real *value);
int pm_integer_of_text(const char *text, uint32_t *value);

#endif
