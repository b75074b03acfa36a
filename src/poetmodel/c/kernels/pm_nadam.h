/* The momentum of a step of NAdam, counted from 1; it increases to beta */
#ifndef PM_NADAM_H
#define PM_NADAM_H

#include "pm_real.h"

static inline pm_real pm_nadam_momentum(pm_real steps, pm_real beta, pm_real log_decay)
{
    return beta * (PM_C(1.0) - PM_C(0.5) * PM_EXP(steps * log_decay));
}

#endif
