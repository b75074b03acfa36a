/* Correlations of channels with windows, four channels and four positions at once: convolutions and the gradients of
   their inputs. Each sum is over channels, rows and columns of the window in this order, for all block sizes. */
#ifndef PM_CORRELATE_H
#define PM_CORRELATE_H

#include "pm_conv.h"

/* A correlation of some result channels with all input channels of their group; strides in elements. */
typedef struct {
    pm_axis down, across;
    int32_t channels;  /* number of summed channels */
    int32_t x_channel; /* stride between these in x */
    int32_t x_row;
    int32_t w_channel; /* stride between these in w */
    int32_t w_down;    /* stride between taps */
    int32_t w_across;
    int32_t w_result; /* stride between result channels */
    int32_t out_channel;
    int32_t out_row;
    int32_t out_step;
    int32_t accumulate; /* whether sums start with the values in the result */
} pm_correlation;

#define PM_SUM_TAPS(TAP, LOAD, ...)                            \
    for (int32_t k = c->channels; k > 0; k--) {                \
        const pm_real *x_row = x, *w_row = w;                  \
        for (int32_t i = rows; i > 0; i--) {                   \
            const pm_real *p = x_row, *q = w_row;              \
            LOAD                                               \
            for (int32_t j = columns; j > 0; j--) {            \
                __VA_ARGS__                                    \
                p += TAP;                                      \
            }                                                  \
            x_row += x_down;                                   \
            w_row += c->w_down;                                \
        }                                                      \
        x += c->x_channel;                                     \
        w += c->w_channel;                                     \
    }

/* One result channel at one position. */
static PM_OUT_OF_LINE void pm_sum_1x1(const pm_correlation *c, pm_real *out, const pm_real *x, const pm_real *w,
                              const pm_real *bias, int32_t rows, int32_t columns)
{
    const int32_t tap = c->across.tap_step, x_down = c->down.tap_step * c->x_row, w_across = c->w_across;
    pm_real a = c->accumulate ? *out : bias ? *bias : 0;
    PM_SUM_TAPS(tap, , a += *p * *q; q += w_across;)
    *out = a;
}

/* One result channel at four positions, `step` elements of x apart. */
static PM_OUT_OF_LINE void pm_sum_1x4(const pm_correlation *c, pm_real *out, const pm_real *x, const pm_real *w,
                              const pm_real *bias, int32_t rows, int32_t columns, const int32_t step)
{
    const int32_t tap = c->across.tap_step, x_down = c->down.tap_step * c->x_row, w_across = c->w_across;
    const int32_t next = c->out_step;
    pm_real a = bias ? *bias : 0, b = a, d = a, e = a;
    if (c->accumulate) {
        a = out[0], b = out[next], d = out[2 * next], e = out[3 * next];
    }
    PM_SUM_TAPS(tap, , const pm_real v = *q; a += p[0] * v; b += p[step] * v; d += p[2 * step] * v; e += p[3 * step] * v;
                q += w_across;)
    out[0] = a, out[next] = b, out[2 * next] = d, out[3 * next] = e;
}

#define PM_FOUR_WEIGHTS const pm_real *q1 = q + w_result, *q2 = q1 + w_result, *q3 = q2 + w_result;
#define PM_NEXT_WEIGHTS q += w_across, q1 += w_across, q2 += w_across, q3 += w_across;

/* Four result channels at one position. `slide`: see pm_correlate. */
static PM_OUT_OF_LINE void pm_sum_4x1(const pm_correlation *c, pm_real *out, const pm_real *x, const pm_real *w,
                              const pm_real *bias, int32_t rows, int32_t columns, const int32_t slide)
{
    const int32_t tap = c->across.tap_step, x_down = c->down.tap_step * c->x_row, w_across = c->w_across;
    const int32_t w_result = c->w_result, channel = c->out_channel;
    pm_real a = 0, b = 0, d = 0, e = 0;
    if (c->accumulate) {
        a = out[0], b = out[channel], d = out[2 * channel], e = out[3 * channel];
    } else if (bias) {
        a = bias[0], b = bias[1], d = bias[2], e = bias[3];
    }
    if (w_across == 1 && tap == slide) {
        PM_SUM_TAPS(slide, PM_FOUR_WEIGHTS,
                    const pm_real v = *p; a += v * *q++; b += v * *q1++; d += v * *q2++; e += v * *q3++;)
    } else {
        PM_SUM_TAPS(tap, PM_FOUR_WEIGHTS, const pm_real v = *p; a += v * *q; b += v * *q1; d += v * *q2; e += v * *q3;
                    PM_NEXT_WEIGHTS)
    }
    out[0] = a, out[channel] = b, out[2 * channel] = d, out[3 * channel] = e;
}

#define PM_START_FOUR(a, n)                                                                   \
    pm_real a##0 = bias ? bias[n] : 0, a##1 = a##0, a##2 = a##0, a##3 = a##0;                 \
    if (c->accumulate) {                                                                      \
        const pm_real *o = out + (n) * channel;                                               \
        a##0 = o[0], a##1 = o[next], a##2 = o[2 * next], a##3 = o[3 * next];                  \
    }
#define PM_ADD_FOUR(a, weight)             \
    {                                      \
        const pm_real v = *weight;         \
        weight += w_across;                \
        a##0 += v * x0, a##1 += v * x1;    \
        a##2 += v * x2, a##3 += v * x3;    \
    }
#define PM_STORE_FOUR(a, n)                                                  \
    {                                                                        \
        pm_real *o = out + (n) * channel;                                    \
        o[0] = a##0, o[next] = a##1, o[2 * next] = a##2, o[3 * next] = a##3; \
    }

/* Four result channels at four positions. */
static PM_OUT_OF_LINE void pm_sum_4x4(const pm_correlation *c, pm_real *out, const pm_real *x, const pm_real *w,
                              const pm_real *bias, int32_t rows, int32_t columns, const int32_t step)
{
    const int32_t tap = c->across.tap_step, x_down = c->down.tap_step * c->x_row, w_across = c->w_across;
    const int32_t w_result = c->w_result, channel = c->out_channel, next = c->out_step;
    PM_START_FOUR(a, 0)
    PM_START_FOUR(b, 1)
    PM_START_FOUR(d, 2)
    PM_START_FOUR(e, 3)
    PM_SUM_TAPS(tap, PM_FOUR_WEIGHTS,
                const pm_real x0 = p[0], x1 = p[step], x2 = p[2 * step], x3 = p[3 * step];
                PM_ADD_FOUR(a, q) PM_ADD_FOUR(b, q1) PM_ADD_FOUR(d, q2) PM_ADD_FOUR(e, q3))
    PM_STORE_FOUR(a, 0)
    PM_STORE_FOUR(b, 1)
    PM_STORE_FOUR(d, 2)
    PM_STORE_FOUR(e, 3)
}

#define PM_ADD_TAP(j, x0, x1, x2, x3)                                                                \
    {                                                                                                \
        const pm_real v = q[j], v1 = q1[j], v2 = q2[j], v3 = q3[j];                                  \
        a0 += v * x0, a1 += v * x1, a2 += v * x2, a3 += v * x3;                                      \
        b0 += v1 * x0, b1 += v1 * x1, b2 += v1 * x2, b3 += v1 * x3;                                  \
        d0 += v2 * x0, d1 += v2 * x1, d2 += v2 * x2, d3 += v2 * x3;                                  \
        e0 += v3 * x0, e1 += v3 * x1, e2 += v3 * x2, e3 += v3 * x3;                                  \
    }

/* Four result channels at four consecutive positions, with windows of 3 or 5 columns: each element of x is read once
   for all of them. `step` is 1, or -1 if taps and positions run from right to left. */
static PM_OUT_OF_LINE void pm_slide_4x4(const pm_correlation *c, pm_real *out, const pm_real *x, const pm_real *w,
                                        const pm_real *bias, int32_t rows, int32_t columns, const int32_t step)
{
    const int32_t x_down = c->down.tap_step * c->x_row, w_result = c->w_result;
    const int32_t channel = c->out_channel, next = step * c->out_step;
    PM_START_FOUR(a, 0)
    PM_START_FOUR(b, 1)
    PM_START_FOUR(d, 2)
    PM_START_FOUR(e, 3)
    for (int32_t k = c->channels; k > 0; k--) {
        const pm_real *p = x, *q = w;
        for (int32_t i = rows; i > 0; i--) {
            PM_FOUR_WEIGHTS
            pm_real x0 = p[0], x1 = p[step], x2 = p[2 * step], x3 = p[3 * step];
            PM_ADD_TAP(0, x0, x1, x2, x3)
            x0 = p[4 * step];
            PM_ADD_TAP(1, x1, x2, x3, x0)
            x1 = p[5 * step];
            PM_ADD_TAP(2, x2, x3, x0, x1)
            if (columns == 5) {
                x2 = p[6 * step];
                PM_ADD_TAP(3, x3, x0, x1, x2)
                x3 = p[7 * step];
                PM_ADD_TAP(4, x0, x1, x2, x3)
            }
            p += x_down;
            q += c->w_down;
        }
        x += c->x_channel;
        w += c->w_channel;
    }
    PM_STORE_FOUR(a, 0)
    PM_STORE_FOUR(b, 1)
    PM_STORE_FOUR(d, 2)
    PM_STORE_FOUR(e, 3)
}

/* A row of the result of four channels, or of one. `step` is the stride of positions, or 0 for one position at a
   time. */
static inline void pm_correlate_row(const pm_correlation *c, pm_real *out, const pm_real *x, const pm_real *w,
                                    const pm_real *bias, int32_t rows, int32_t four, const int32_t step,
                                    const int32_t slide)
{
    const pm_axis *across = &c->across;
    const int32_t sliding = step == 1 && four && c->w_across == 1 && across->tap_step == slide &&
                            (across->taps == 3 || across->taps == 5);
    const int32_t turn = slide == 1 ? 0 : 3;
    int32_t place = across->start;
    for (int32_t j = 0; j < across->places;) {
        int32_t end, last_end;
        const int32_t first = pm_taps(across, place, &end);
        const pm_real *from = x + place + first * across->tap_step, *taps = w + first * c->w_across;
        if (step && j + 4 <= across->places && first == 0 && end == across->taps &&
            pm_taps(across, place + 3 * step, &last_end) == 0 && last_end == across->taps) {
            if (sliding) {
                pm_slide_4x4(c, out + turn * c->out_step, from + turn, taps, bias, rows, end, slide);
            } else if (four) {
                pm_sum_4x4(c, out, from, taps, bias, rows, end, step);
            } else {
                pm_sum_1x4(c, out, from, taps, bias, rows, end, step);
            }
            j += 4;
            place += 4 * step;
            out += 4 * c->out_step;
            continue;
        }
        if (four) {
            pm_sum_4x1(c, out, from, taps, bias, rows, end - first, slide);
        } else {
            pm_sum_1x1(c, out, from, taps, bias, rows, end - first);
        }
        j++;
        place += across->step;
        out += c->out_step;
    }
}

/* Some result channels of one element of the batch. `strides`: whether positions may have stride 2. `slide`:
   direction of taps, 1 or -1. */
static inline void pm_correlate(const pm_correlation *c, pm_real *out, const pm_real *x, const pm_real *w,
                                const pm_real *bias, int32_t results, const int32_t strides, const int32_t slide)
{
    for (int32_t r = 0; r < results;) {
        const int32_t four = results - r >= 4;
        pm_real *row = out;
        int32_t place = c->down.start;
        for (int32_t i = 0; i < c->down.places; i++) {
            int32_t end;
            const int32_t first = pm_taps(&c->down, place, &end);
            const pm_real *from = x + (place + first * c->down.tap_step) * c->x_row, *taps = w + first * c->w_down;
            if (c->across.step == 1) {
                pm_correlate_row(c, row, from, taps, bias, end - first, four, 1, slide);
            } else if (strides && c->across.step == 2) {
                pm_correlate_row(c, row, from, taps, bias, end - first, four, 2, slide);
            } else if (strides) {
                pm_correlate_row(c, row, from, taps, bias, end - first, four, 0, slide);
            }
            place += c->down.step;
            row += c->out_row;
        }
        const int32_t done = four ? 4 : 1;
        r += done;
        out += done * c->out_channel;
        w += done * c->w_result;
        bias = bias ? bias + done : bias;
    }
}

#endif
