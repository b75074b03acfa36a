/* Bilinear interpolation of x (x_height x x_width) to out (height x width); row_scale and column_scale are the
   distances in x of adjacent rows and columns of out (see pm_bilinear.h). `steps`: those of out and x (see
   pm_planes.h). */
#include "pm_bilinear.h"
#include "pm_kernels.h"

void pm_bilinear2d(pm_real *out, const pm_real *x, const int32_t *steps, int32_t batch, int32_t channels,
                   int32_t x_height, int32_t x_width, int32_t height, int32_t width, int32_t aligned,
                   pm_real row_scale, pm_real column_scale)
{
    const int32_t *x_steps = steps + 4;
    for (int32_t i = 0; i < height; i++) {
        const pm_between v = pm_from(i, row_scale, x_height, aligned);
        for (int32_t j = 0; j < width; j++) {
            const pm_between h = pm_from(j, column_scale, x_width, aligned);
            const int32_t left = h.low * x_steps[3], right = h.high * x_steps[3];
            for (int32_t p = 0; p < batch * channels; p++) {
                const pm_real *plane = x + pm_plane_at(x_steps, p, channels);
                const pm_real *top = plane + v.low * x_steps[2], *bottom = plane + v.high * x_steps[2];
                out[pm_plane_at(steps, p, channels) + i * steps[2] + j * steps[3]] =
                    (1 - v.share) * ((1 - h.share) * top[left] + h.share * top[right]) +
                    v.share * ((1 - h.share) * bottom[left] + h.share * bottom[right]);
            }
        }
    }
}
