/* Where gradients of weights go once they are summed: into memory, or into the weights themselves. */
#ifndef PM_UPDATE_H
#define PM_UPDATE_H

#include "pm_real.h"

/* An update of weights by their gradients, as by pm_sgd. */
typedef struct {
    pm_real lr;
    pm_real sign;
    pm_real decay;
    int32_t plain; /* the sign is 1, and there is no decay */
} pm_update;

/* Puts a sum there, or updates what is there with it. */
static inline void pm_put(pm_real *out, pm_real s, const pm_update *u)
{
    if (!u) {
        *out = s;
    } else if (u->plain) {
        *out -= u->lr * s;
    } else {
        *out -= u->lr * (u->sign * s + u->decay * *out);
    }
}

#endif
