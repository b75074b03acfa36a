/* The two source rows or columns of a row or column of bilinear interpolation. */
#ifndef PM_BILINEAR_H
#define PM_BILINEAR_H

#include "pm_planes.h"

typedef struct {
    int32_t low, high;
    pm_real share; /* weight of `high` */
} pm_between;

/* Returns the sources of row or column `place`; `scale` is the distance in the source of adjacent rows or columns. With
   `aligned`, the corner pixels of both planes coincide, otherwise their edges. */
static inline pm_between pm_from(int32_t place, pm_real scale, int32_t size, int32_t aligned)
{
    pm_real at = scale * (pm_real)place;
    if (!aligned) {
        at = scale * ((pm_real)place + PM_C(0.5)) - PM_C(0.5);
        at = at < 0 ? 0 : at;
    }
    int32_t low = (int32_t)at;
    low = low < size - 1 ? low : size - 1;
    const pm_real share = at - (pm_real)low;
    return (pm_between){low, low < size - 1 ? low + 1 : low, share < 1 ? share : 1};
}

#endif
