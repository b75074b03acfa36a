/* Interpolates between two numbers, from the nearer one, as PyTorch does. */
#ifndef PM_LERP_H
#define PM_LERP_H

#include "pm_real.h"

static inline pm_real pm_between(pm_real x, pm_real y, pm_real part)
{
    const pm_real way = y - x;
    return part < PM_C(0.5) ? x + part * way : y - way * (PM_C(1.0) - part);
}

#endif
