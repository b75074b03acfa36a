/* The gradient of bilinear interpolation; arguments as for pm_bilinear2d, dx in place of x and dy in place of out.
   `steps`: those of dx and dy (see pm_planes.h). */
#include "pm_bilinear.h"
#include "pm_kernels.h"

void pm_bilinear2d_backward(pm_real *dx, const pm_real *dy, const int32_t *steps, int32_t batch, int32_t channels,
                            int32_t x_height, int32_t x_width, int32_t height, int32_t width, int32_t aligned,
                            pm_real row_scale, pm_real column_scale)
{
    const int32_t *y_steps = steps + 4;
    for (int32_t p = 0; p < batch * channels; p++) {
        pm_clear_plane(dx + pm_plane_at(steps, p, channels), steps, x_height, x_width);
    }
    for (int32_t i = 0; i < height; i++) {
        const pm_between v = pm_from(i, row_scale, x_height, aligned);
        for (int32_t j = 0; j < width; j++) {
            const pm_between h = pm_from(j, column_scale, x_width, aligned);
            const int32_t left = h.low * steps[3], right = h.high * steps[3];
            for (int32_t p = 0; p < batch * channels; p++) {
                pm_real *plane = dx + pm_plane_at(steps, p, channels);
                pm_real *top = plane + v.low * steps[2], *bottom = plane + v.high * steps[2];
                const pm_real g = dy[pm_plane_at(y_steps, p, channels) + i * y_steps[2] + j * y_steps[3]];
                top[left] += (1 - v.share) * (1 - h.share) * g;
                top[right] += (1 - v.share) * h.share * g;
                bottom[left] += v.share * (1 - h.share) * g;
                bottom[right] += v.share * h.share * g;
            }
        }
    }
}
