/* Destination of summed gradients of weights: memory, or an update of the weights. */
#ifndef PM_UPDATE_H
#define PM_UPDATE_H

#include "pm_real.h"

/* An update of weights by their gradients, as in pm_sgd. */
typedef struct {
    pm_real lr;
    pm_real sign;
    pm_real decay;
    int32_t plain; /* whether the sign is 1, without decay */
} pm_update;

/* Stores a sum, or updates a weight with it. */
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
