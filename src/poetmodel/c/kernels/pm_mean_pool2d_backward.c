/* The gradient of pm_mean_pool2d, distributed equally to the elements of each window; arguments as for
   pm_mean_pool2d, with dx in place of x, `x_height` x `x_width`. `steps`: those of dx and dy (see pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_mean_pool2d_backward(pm_real *dx, const pm_real *dy, const int32_t *rows, const int32_t *columns,
                             const int32_t *steps, int32_t batch, int32_t channels, int32_t x_height, int32_t x_width,
                             int32_t height, int32_t width, int32_t divisor)
{
    const int32_t *y_steps = steps + 4;
    for (int32_t p = 0; p < batch * channels; p++) {
        pm_real *plane = dx + pm_plane_at(steps, p, channels);
        const pm_real *from = dy + pm_plane_at(y_steps, p, channels);
        pm_clear_plane(plane, steps, x_height, x_width);
        for (int32_t i = 0; i < height; i++) {
            const int32_t *row = rows + 3 * i;
            for (int32_t j = 0; j < width; j++) {
                const int32_t *column = columns + 3 * j;
                const pm_real share =
                    from[i * y_steps[2] + j * y_steps[3]] / (pm_real)(divisor > 0 ? divisor : row[2] * column[2]);
                for (int32_t y = row[0]; y < row[1]; y++) {
                    pm_real *to = plane + y * steps[2] + column[0] * steps[3];
                    for (int32_t z = column[1] - column[0]; z > 0; z--) {
                        *to += share;
                        to += steps[3];
                    }
                }
            }
        }
    }
}
