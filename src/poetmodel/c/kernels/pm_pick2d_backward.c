/* dx[…, rows[i], columns[j]] += dy[…, i, j], starting from zeros, for dx of x_height x x_width and dy of height x
   width. `steps`: those of dx and dy (see pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_pick2d_backward(pm_real *dx, const pm_real *dy, const int32_t *rows, const int32_t *columns,
                        const int32_t *steps, int32_t batch, int32_t channels, int32_t x_height, int32_t x_width,
                        int32_t height, int32_t width)
{
    const int32_t *y_steps = steps + 4;
    for (int32_t p = 0; p < batch * channels; p++) {
        pm_real *plane = dx + pm_plane_at(steps, p, channels);
        const pm_real *from = dy + pm_plane_at(y_steps, p, channels);
        pm_clear_plane(plane, steps, x_height, x_width);
        for (int32_t i = 0; i < height; i++) {
            pm_real *row = plane + rows[i] * steps[2];
            for (int32_t j = 0; j < width; j++) {
                row[columns[j] * steps[3]] += from[i * y_steps[2] + j * y_steps[3]];
            }
        }
    }
}
