/* What kernels on planes share. `steps` has the four steps of each tensor, outputs first: from one element of the
batch, channel, row and column to the next. `rows` and `columns` say for each row or column of the smaller (or made)
plane which of the other it sees. */
#ifndef PM_PLANES_H
#define PM_PLANES_H

#include "pm_real.h"

/* Where plane p of a tensor begins. */
static inline int32_t pm_plane_at(const int32_t *steps, int32_t p, int32_t channels)
{
    return p / channels * steps[0] + p % channels * steps[1];
}

/* The elements of a plane become zero. */
static inline void pm_clear_plane(pm_real *x, const int32_t *steps, int32_t height, int32_t width)
{
    for (int32_t i = 0; i < height; i++) {
        for (int32_t j = 0; j < width; j++) {
            x[i * steps[2] + j * steps[3]] = 0;
        }
    }
}

#endif
