/* A quantized convolution in which each result sees the channel of its number; arguments as for pm_q8_conv2d, but
weights lie with the channels last, too: rows and columns of the window, channels. */
#include "pm_conv.h"
#include "pm_q8.h"
#include "pm_kernels.h"

/* Adds a tap to the sums of four channels; if it is `moved`, less the zero of x. */
static inline void pm_q8_tap(pm_q8_sums *s, const int8_t *x, const int8_t *w, int32_t zero, const int moved)
{
#if PM_Q8_SIMD
    const uint32_t word = pm_q8_word(x), weights = pm_q8_word(w);
    int16x2_t even = pm_q8_even(word), odd = pm_q8_odd(word);
    if (moved) {
        even = __ssub16(even, pm_q8_halves(zero)), odd = __ssub16(odd, pm_q8_halves(zero));
    }
    const int16x2_t w_even = pm_q8_even(weights), w_odd = pm_q8_odd(weights);
    s->a = __smlabb(even, w_even, s->a);
    s->b = __smlabb(odd, w_odd, s->b);
    s->c = __smlatt(even, w_even, s->c);
    s->d = __smlatt(odd, w_odd, s->d);
#else
    zero = moved ? zero : 0;
    s->a += (x[0] - zero) * w[0];
    s->b += (x[1] - zero) * w[1];
    s->c += (x[2] - zero) * w[2];
    s->d += (x[3] - zero) * w[3];
#endif
}

/* Adds three taps, so many elements apart. */
static inline void pm_q8_three(pm_q8_sums *s, const int8_t *x, const int8_t *w, int32_t next, int32_t channels)
{
    pm_q8_tap(s, x, w, 0, 0);
    pm_q8_tap(s, x + next, w + channels, 0, 0);
    pm_q8_tap(s, x + 2 * next, w + 2 * channels, 0, 0);
}

/* What places see of the input and of the window: pointers to the first elements, and the taps in rows and columns. */
typedef struct {
    const int8_t *x, *w;
    int32_t rows, columns;
    int32_t down, next;      /* in x, from one tap to the next */
    int32_t window_row;      /* in w */
    int32_t channels;
} pm_q8_view;

/* The sums of four channels from c on. */
static inline void pm_q8_window(pm_q8_sums *s, const pm_q8_view *view, int32_t c, int32_t zero, const int moved)
{
    const int8_t *x = view->x + c, *w = view->w + c;
    for (int32_t r = view->rows; r > 0; r--) {
        const int8_t *p = x, *v = w;
        for (int32_t t = view->columns; t > 0; t--) {
            pm_q8_tap(s, p, v, zero, moved);
            p += view->next;
            v += view->channels;
        }
        x += view->down;
        w += view->window_row;
    }
}

void pm_q8_depthwise(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                     const pm_real *bias, const int32_t *shape, int32_t batch, int32_t zero_x, pm_real inverse,
                     int32_t zero, int32_t low, int32_t high)
{
    const pm_real *restrict const scales = scale, *restrict const biases = bias;
    const int32_t *restrict const starts = start;
    const float factor = (float)inverse;
    const int32_t channels = shape[PM_IN], window_row = shape[PM_WINDOW_W] * channels;
    const int32_t next = shape[PM_DILATION_W] * channels, down = shape[PM_DILATION_H] * shape[PM_IN_W] * channels;
    const pm_axis rows = {shape[PM_OUT_H], 0, 0, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis columns = {shape[PM_OUT_W], 0, 0, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    int8_t *to = out;
    for (int32_t k = 0; k < batch * rows.places; k++) {
        const int32_t i = k % rows.places * shape[PM_STRIDE_H] - shape[PM_PAD_H];
        const int32_t image = (k / rows.places * shape[PM_IN_H] + i) * shape[PM_IN_W] * channels;
        int32_t bottom, right;
        const int32_t top = pm_taps(&rows, i, &bottom);
        for (int32_t place = 0; place < columns.places; place++) {
            const int32_t j = place * shape[PM_STRIDE_W] - shape[PM_PAD_W];
            const int32_t left = pm_taps(&columns, j, &right);
            const pm_q8_view view = {x + (image + top * down + j * channels + left * next),
                                     w + top * window_row + left * channels, bottom - top, right - left, down, next,
                                     window_row, channels};
            const int whole = view.rows == rows.taps && view.columns == columns.taps;
            int32_t c = 0;
            for (; c + 4 <= channels; c += 4) {
                pm_q8_sums s = {0, 0, 0, 0};
                if (whole) {
                    s = (pm_q8_sums){starts[c], starts[c + 1], starts[c + 2], starts[c + 3]};
                }
                if (!whole) {
                    pm_q8_window(&s, &view, c, zero_x, 1);
                } else if (view.rows == 3 && view.columns == 3) {
                    const int8_t *p = view.x + c, *v = view.w + c;
                    pm_q8_three(&s, p, v, next, channels);
                    pm_q8_three(&s, p + down, v + window_row, next, channels);
                    pm_q8_three(&s, p + 2 * down, v + 2 * window_row, next, channels);
                } else {
                    pm_q8_window(&s, &view, c, 0, 0);
                }
                to[0] = pm_q8_result(s.a, (float)scales[c], (float)biases[c], factor, zero);
                to[1] = pm_q8_result(s.b, (float)scales[c + 1], (float)biases[c + 1], factor, zero);
                to[2] = pm_q8_result(s.c, (float)scales[c + 2], (float)biases[c + 2], factor, zero);
                to[3] = pm_q8_result(s.d, (float)scales[c + 3], (float)biases[c + 3], factor, zero);
                to += 4;
            }
            for (; c < channels; c++) {
                int32_t sum = 0;
                for (int32_t r = 0; r < view.rows; r++) {
                    const int8_t *p = view.x + c + r * down, *v = view.w + c + r * window_row;
                    for (int32_t t = view.columns; t > 0; t--) {
                        sum += (*p - zero_x) * *v;
                        p += next;
                        v += channels;
                    }
                }
                *to++ = pm_q8_result(sum, (float)scales[c], (float)biases[c], factor, zero);
            }
        }
    }
    pm_q8_limit(out, batch * rows.places * columns.places * channels, low, high);
}
