/* Loops over tensors with any strides.

   A shape table has the number of dimensions (1 to PM_RANK), then for each dimension, the innermost first, its size
   and the stride of each tensor [elements], which is 0 if a tensor repeats. PM_EACH_2(shape, i, j) { out[i] = -x[j];
   } executes the block once for each element. Tensors with equal contiguous layout have one dimension only, and an
   output may then be one of the inputs.

   Reductions such as sums have two tables: outer loops over the output and the first element of each sum in the
   inputs, inner over the elements of one sum in the inputs. */
#ifndef PM_EACH_H
#define PM_EACH_H

#include "pm_real.h"

#define PM_RANK 6

/* Kernels with few instructions per element define this as PM_UNROLL(4). */
#ifndef PM_EACH_UNROLL
#define PM_EACH_UNROLL
#endif

typedef struct {
    int32_t at[PM_RANK]; /* index in each dimension except the innermost */
    int32_t first[5];    /* start of the row in each tensor */
    int32_t is_there;    /* 0 after the last row */
} pm_row;

static inline void pm_next_row(pm_row *row, const int32_t *shape, int32_t tensors)
{
    const int32_t *dimension = shape + 1;
    row->is_there = 0;
    for (int32_t k = 1; k < shape[0]; k++) {
        dimension += 1 + tensors;
        row->at[k]++;
        row->is_there = row->at[k] < dimension[0];
        for (int32_t t = 0; t < tensors; t++) {
            row->first[t] += row->is_there ? dimension[1 + t] : dimension[1 + t] * (1 - dimension[0]);
        }
        if (row->is_there) {
            return;
        }
        row->at[k] = 0;
    }
}

#define PM_ROWS(shape, i, tensors) \
    for (pm_row row_##i = {{0}, {0}, 1}; row_##i.is_there; pm_next_row(&row_##i, shape, tensors))

#define PM_EACH_1(shape, i) \
    PM_ROWS(shape, i, 1)    \
    PM_EACH_UNROLL          \
    for (int32_t i = row_##i.first[0], left_##i = (shape)[1]; left_##i > 0; left_##i--, i += (shape)[2])

#define PM_EACH_2(shape, i, j)                                                                                \
    PM_ROWS(shape, i, 2)                                                                                      \
    PM_EACH_UNROLL                                                                                            \
    for (int32_t i = row_##i.first[0], j = row_##i.first[1], left_##i = (shape)[1]; left_##i > 0; left_##i--, \
                 i += (shape)[2], j += (shape)[3])

#define PM_EACH_3(shape, i, j, k)                                                                         \
    PM_ROWS(shape, i, 3)                                                                                  \
    PM_EACH_UNROLL                                                                                        \
    for (int32_t i = row_##i.first[0], j = row_##i.first[1], k = row_##i.first[2], left_##i = (shape)[1]; \
         left_##i > 0; left_##i--, i += (shape)[2], j += (shape)[3], k += (shape)[4])

#define PM_EACH_4(shape, i, j, k, l)                                                                     \
    PM_ROWS(shape, i, 4)                                                                                 \
    PM_EACH_UNROLL                                                                                       \
    for (int32_t i = row_##i.first[0], j = row_##i.first[1], k = row_##i.first[2], l = row_##i.first[3], \
                 left_##i = (shape)[1];                                                                  \
         left_##i > 0; left_##i--, i += (shape)[2], j += (shape)[3], k += (shape)[4], l += (shape)[5])

#define PM_EACH_5(shape, i, j, k, l, m)                                                                  \
    PM_ROWS(shape, i, 5)                                                                                 \
    PM_EACH_UNROLL                                                                                       \
    for (int32_t i = row_##i.first[0], j = row_##i.first[1], k = row_##i.first[2], l = row_##i.first[3], \
                 m = row_##i.first[4], left_##i = (shape)[1];                                            \
         left_##i > 0; left_##i--, i += (shape)[2], j += (shape)[3], k += (shape)[4], l += (shape)[5],   \
                 m += (shape)[6])

#endif
