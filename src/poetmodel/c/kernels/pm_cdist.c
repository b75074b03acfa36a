/* out = distances of each row of x to each row of y, of order 1 or 2; tensors are contiguous */
#include "pm_kernels.h"
#include "pm_total.h"

void pm_cdist(pm_real *out, const pm_real *x, const pm_real *y, int32_t batches, int32_t rows, int32_t columns, int32_t n,
              int32_t order)
{
    for (int32_t b = 0; b < batches; b++, x += rows * n, y += columns * n, out += rows * columns) {
        for (int32_t i = 0; i < rows; i++) {
            for (int32_t j = 0; j < columns; j++) {
                pm_total total = {0, 0};
                for (int32_t k = 0; k < n; k++) {
                    const pm_real apart = x[i * n + k] - y[j * n + k];
                    pm_add_to(&total, order == 1 ? PM_FABS(apart) : apart * apart);
                }
                out[i * columns + j] = order == 1 ? total.sum : PM_SQRT(total.sum);
            }
        }
    }
}
