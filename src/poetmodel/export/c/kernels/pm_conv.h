/* What the kernels of convolutions share: the meaning of `shape`, and sums over the taps of a window.

`shape` has 16 numbers: channels, height, width of the input; channels, height, width of the output; height and width
of the window; then, each down and across, stride, padding and dilation; groups; and the step of the weights from one
output channel to the next, 0 where they lie one after the other. A layer of which some input channels are given, or
wanted, has the step of all. A convolution in one dimension has
height 1. Tensors lie in order, batch first; only the step from one element of the batch to the next is free where a
kernel has an argument for it.

`first` and `count` choose output channels. Pointers to weights, bias and output (or its gradient) point to those of
channel `first`: a layer whose weights are in tiles is a sequence of calls over ranges of channels. */
#ifndef PM_CONV_H
#define PM_CONV_H

#include "pm_real.h"

enum {
    PM_IN,
    PM_IN_H,
    PM_IN_W,
    PM_OUT,
    PM_OUT_H,
    PM_OUT_W,
    PM_WINDOW_H,
    PM_WINDOW_W,
    PM_STRIDE_H,
    PM_STRIDE_W,
    PM_PAD_H,
    PM_PAD_W,
    PM_DILATION_H,
    PM_DILATION_W,
    PM_GROUPS,
    PM_FILTER
};

/* The step of the weights from one output channel to the next. */
static inline int32_t pm_filter(const int32_t *shape)
{
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS];
    return shape[PM_FILTER] ? shape[PM_FILTER] : channels * shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
}

/* One direction of a correlation: places of the result, and for each the taps that fall into the input. */
typedef struct {
    int32_t places;
    int32_t start;    /* where in the input tap 0 of place 0 is, perhaps outside of it */
    int32_t step;     /* from one place to the next */
    int32_t size;     /* of the input */
    int32_t taps;
    int32_t tap_step; /* from one tap to the next; may be negative */
} pm_axis;

/* The first of the taps that fall into the input where tap 0 is at `place`; *end is after the last. */
static inline int32_t pm_taps(const pm_axis *axis, int32_t place, int32_t *end)
{
    int32_t step = axis->tap_step, before = -place, within = axis->size - 1 - place;
    if (step < 0) {
        step = -step;
        before = -within;
        within = place;
    }
    int32_t first = before > 0 ? (before + step - 1) / step : 0;
    int32_t last = within < 0 ? 0 : within / step + 1;
    *end = last < axis->taps ? last : axis->taps;
    return first < *end ? first : *end;
}

/* Places o >= 0 with 0 <= o * stride + offset < size: returns the first, *end is after the last; places in all. */
static inline int32_t pm_places(int32_t offset, int32_t stride, int32_t size, int32_t places, int32_t *end)
{
    pm_axis axis = {1, 0, 1, size, places, stride};
    return pm_taps(&axis, offset, end);
}

#endif
