/* out = x on and below a diagonal (is_lower), or on and above it, otherwise 0

   outer loops over matrices of out and x. */
#include "pm_each.h"
#include "pm_kernels.h"

void pm_triangle_byte(uint8_t *out, const uint8_t *x, const int32_t *outer, int32_t rows, int32_t columns,
                      int32_t out_row, int32_t out_column, int32_t x_row, int32_t x_column, int32_t diagonal,
                      int32_t is_lower)
{
    PM_EACH_2(outer, i, j) {
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t c = 0; c < columns; c++) {
                const int32_t stays = is_lower ? c - r <= diagonal : c - r >= diagonal;
                out[i + r * out_row + c * out_column] = stays ? x[j + r * x_row + c * x_column] : 0;
            }
        }
    }
}
