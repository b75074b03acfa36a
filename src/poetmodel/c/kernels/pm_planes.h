/* Common code of kernels on planes. `steps` has the four strides of each tensor, outputs first: of batch, channel,
   row and column. `rows` and `columns` have, for each row or column of the smaller (or computed) plane, its rows or
   columns in the other plane. */
#ifndef PM_PLANES_H
#define PM_PLANES_H

#include "pm_real.h"

/* Returns the offset of plane p of a tensor [elements]. */
static inline int32_t pm_plane_at(const int32_t *steps, int32_t p, int32_t channels)
{
    return p / channels * steps[0] + p % channels * steps[1];
}

/* Sets the elements of a plane to zero. */
static inline void pm_clear_plane(pm_real *x, const int32_t *steps, int32_t height, int32_t width)
{
    for (int32_t i = 0; i < height; i++) {
        for (int32_t j = 0; j < width; j++) {
            x[i * steps[2] + j * steps[3]] = 0;
        }
    }
}

#endif
