/* Bags of rows of a table: bag b has the indices from offset[b] up to the next offset, or to the last index */
#ifndef PM_EMBEDDING_BAG_H
#define PM_EMBEDDING_BAG_H

#include "pm_real.h"

enum { PM_BAG_SUM, PM_BAG_MEAN, PM_BAG_MAX };

static inline int32_t pm_bag_end(const int32_t *offset, int32_t b, int32_t offsets, int32_t count)
{
    return b + 1 < offsets ? offset[b + 1] : count;
}

/* Returns the number of rows of a bag without padding. */
static inline int32_t pm_bag_size(const int32_t *index, int32_t first, int32_t end, int32_t padding)
{
    int32_t size = 0;
    for (int32_t e = first; e < end; e++) {
        size += index[e] != padding;
    }
    return size;
}

#endif
