/* Compensated sums (Kahan), which carry the rounding error along, so that long sums are as accurate as short ones. */
#ifndef PM_TOTAL_H
#define PM_TOTAL_H

#include "pm_real.h"

typedef struct {
    pm_real sum;
    pm_real excess; /* rounding error of the sum, which the next sum corrects */
} pm_total;

static inline void pm_add_to(pm_total *total, pm_real x)
{
    const pm_real corrected = x - total->excess;
    const pm_real sum = total->sum + corrected;
    total->excess = (sum - total->sum) - corrected;
    total->sum = sum;
}

#endif
