/* out[…, i, j] = x[…, rows[i], columns[j]], for out of height x width. `steps`: those of out and x (see pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_pick2d(pm_real *out, const pm_real *x, const int32_t *rows, const int32_t *columns, const int32_t *steps,
               int32_t batch, int32_t channels, int32_t height, int32_t width)
{
    const int32_t *x_steps = steps + 4;
    for (int32_t p = 0; p < batch * channels; p++) {
        const pm_real *plane = x + pm_plane_at(x_steps, p, channels);
        pm_real *to = out + pm_plane_at(steps, p, channels);
        for (int32_t i = 0; i < height; i++) {
            const pm_real *row = plane + rows[i] * x_steps[2];
            for (int32_t j = 0; j < width; j++) {
                to[i * steps[2] + j * steps[3]] = row[columns[j] * x_steps[3]];
            }
        }
    }
}
