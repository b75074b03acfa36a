/* out = largest element of each window; indices = its position in x, row times width plus column. indices may be 0
   (not needed). `rows` and `columns` have begin and end of the window of each row and column of out (`height` x
   `width`); elements of a window are `row_step` and `column_step` apart. `steps`: those of out, indices and x (see
   pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_max_pool2d(pm_real *out, int32_t *indices, const pm_real *x, const int32_t *rows, const int32_t *columns,
                   const int32_t *steps, int32_t batch, int32_t channels, int32_t height, int32_t width,
                   int32_t x_width, int32_t row_step, int32_t column_step)
{
    const int32_t *index_steps = steps + 4, *x_steps = steps + 8;
    for (int32_t p = 0; p < batch * channels; p++) {
        const pm_real *plane = x + pm_plane_at(x_steps, p, channels);
        pm_real *to = out + pm_plane_at(steps, p, channels);
        int32_t *places = indices ? indices + pm_plane_at(index_steps, p, channels) : 0;
        for (int32_t i = 0; i < height; i++) {
            for (int32_t j = 0; j < width; j++) {
                pm_real best = -PM_INFINITY;
                int32_t place = rows[2 * i] * x_width + columns[2 * j];
                for (int32_t y = rows[2 * i]; y < rows[2 * i + 1]; y += row_step) {
                    const pm_real *row = plane + y * x_steps[2];
                    for (int32_t z = columns[2 * j]; z < columns[2 * j + 1]; z += column_step) {
                        const pm_real v = row[z * x_steps[3]];
                        if (v > best || v != v) {
                            best = v;
                            place = y * x_width + z;
                        }
                    }
                }
                to[i * steps[2] + j * steps[3]] = best;
                if (places) {
                    places[i * index_steps[2] + j * index_steps[3]] = place;
                }
            }
        }
    }
}
