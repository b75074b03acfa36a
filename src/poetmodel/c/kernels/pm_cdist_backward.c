/* dx = gradient of the rows of x of pm_cdist; tensors are contiguous */
#include "pm_kernels.h"
#include "pm_total.h"

void pm_cdist_backward(pm_real *dx, const pm_real *gradient, const pm_real *x, const pm_real *y,
                       const pm_real *distances, int32_t batches, int32_t rows, int32_t columns, int32_t n, int32_t order)
{
    for (int32_t b = 0; b < batches; b++, x += rows * n, y += columns * n, dx += rows * n) {
        for (int32_t i = 0; i < rows; i++, gradient += columns, distances += columns) {
            for (int32_t k = 0; k < n; k++) {
                pm_total total = {0, 0};
                for (int32_t j = 0; j < columns; j++) {
                    const pm_real apart = x[i * n + k] - y[j * n + k];
                    if (order == 1) {
                        pm_add_to(&total, apart > 0 ? gradient[j] : apart < 0 ? -gradient[j] : PM_C(0.0));
                    } else if (distances[j] != PM_C(0.0)) {
                        pm_add_to(&total, gradient[j] * apart / distances[j]);
                    }
                }
                dx[i * n + k] = total.sum;
            }
        }
    }
}
