/* Common code of convolution kernels: the meaning of `shape`, and sums over the taps of a window.

   `shape` has 16 numbers: channels, height, width of the input; channels, height, width of the output; height and
   width of the window; then, each for rows and columns, stride, padding and dilation; groups; and the stride of the
   weights between output channels, 0 if they are contiguous. A call for some of the input channels of a layer has
   the weight stride of all. A convolution in one dimension has height 1. Tensors are contiguous, batch first; only
   the batch stride is free if a kernel has an argument for it.

   `first` and `count` select output channels. Pointers to weights, bias and output (or its gradient) point to
   channel `first`: a layer with weights in tiles is a sequence of calls for ranges of channels. */
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

/* Returns the stride of the weights between output channels. */
static inline int32_t pm_filter(const int32_t *shape)
{
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS];
    return shape[PM_FILTER] ? shape[PM_FILTER] : channels * shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
}

/* One dimension of a correlation: positions of the result, and for each the taps inside the input. */
typedef struct {
    int32_t places;
    int32_t start;    /* position of tap 0 of result 0 in the input; may be outside */
    int32_t step;     /* stride between results */
    int32_t size;     /* size of the input */
    int32_t taps;
    int32_t tap_step; /* stride between taps; may be negative */
} pm_axis;

/* Returns the first tap inside the input if tap 0 is at `place`; *end is after the last. */
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

/* Returns the first position o >= 0 with 0 <= o * stride + offset < size; *end is after the last; `places` is the
   total number. */
static inline int32_t pm_places(int32_t offset, int32_t stride, int32_t size, int32_t places, int32_t *end)
{
    pm_axis axis = {1, 0, 1, size, places, stride};
    return pm_taps(&axis, offset, end);
}

#endif
