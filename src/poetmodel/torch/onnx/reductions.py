"""ONNX operators: reductions, extremes and sums along axes, matrix products, normalization."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    read_axes,
    read_axis,
    register_operator,
    to_integers,
    to_tensor,
    to_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Reduction = Callable[[torch.Tensor, list[int], bool], torch.Tensor]


def _multiply_axes(x: torch.Tensor, axes: list[int], keep_dims: bool) -> torch.Tensor:  # noqa: FBT001
    """Return the products of elements along `axes`."""
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep_dims)
    return x


_REDUCTIONS: Final[dict[str, Reduction]] = {
    "ReduceL1": lambda x, axes, keep_dims: x.abs().sum(axes, keep_dims),
    "ReduceL2": lambda x, axes, keep_dims: torch.linalg.vector_norm(x, 2, axes, keep_dims),
    "ReduceLogSum": lambda x, axes, keep_dims: x.sum(axes, keep_dims).log(),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _multiply_axes,
    "ReduceSum": torch.sum,
    "ReduceSumSquare": lambda x, axes, keep_dims: (x * x).sum(axes, keep_dims),
}


@register_operator(*_REDUCTIONS, numbers=(1,))
def _reduce_axes(node: OnnxNode, x: Any, axes: Any = None) -> torch.Tensor:
    """Reduce along axes; along all axes if the node has none.

    With ``noop_with_empty_axes`` and no axes, each element is reduced alone. The extreme of no
    elements is in `_EMPTY_EXTREMES`.
    """
    x = to_tensor(x)
    reduced_axes = read_axes(node, axes, rank=x.ndim)
    keep_dims = bool(node.get("keepdims", 1))
    if not reduced_axes and node.get("noop_with_empty_axes", 0):  # each element alone
        x, reduced_axes, keep_dims = x.unsqueeze(-1), [x.ndim], False
    reduced_axes = reduced_axes or list(range(x.ndim))
    neutral = _EMPTY_EXTREMES.get(node.operator)
    if neutral is not None and not x.numel() and (x.is_floating_point() or x.dtype is torch.bool):
        value = neutral if x.is_floating_point() else neutral > 0
        return torch.full(
            x.sum(reduced_axes, keep_dims).shape, value, dtype=x.dtype, device=x.device
        )
    return _REDUCTIONS[node.operator](x, reduced_axes, keep_dims)


_EMPTY_EXTREMES: Final = {"ReduceMax": -math.inf, "ReduceMin": math.inf}
"""Maximum or minimum of no elements; for booleans, whether this number is positive."""


@register_operator("ArgMax", "ArgMin")
def _find_extreme_index(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Return the index of the maximum or minimum along an axis.

    Of equal extremes, this is the first, or the last if ``select_last_index`` is set.
    """
    axis, keep_dims = read_axis(node, x.ndim), bool(node.get("keepdims", 1))
    function = torch.argmax if node.operator == "ArgMax" else torch.argmin
    if node.get("select_last_index", 0):
        last_index: torch.Tensor = (
            x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=keep_dims)
        )
        return last_index
    return function(x, axis, keepdim=keep_dims)


@register_operator("CumSum", numbers=(1,))
def _compute_cumulative_sum(node: OnnxNode, x: Any, axis: Any) -> torch.Tensor:
    """Return sums up to each element, from the end if ``reverse``, without it if ``exclusive``."""
    (sum_axis,) = to_integers(node, axis, "axis")
    x = to_tensor(x)
    x = x.flip(sum_axis) if node.get("reverse", 0) else x
    sums = torch.cumsum(x, sum_axis, dtype=x.dtype)
    if node.get("exclusive", 0):
        zeros = torch.zeros_like(x.narrow(sum_axis, 0, 1))
        sums = torch.cat((zeros, sums.narrow(sum_axis, 0, x.shape[sum_axis] - 1)), sum_axis)
    return sums.flip(sum_axis) if node.get("reverse", 0) else sums


@register_operator("TopK", numbers=(1,))
def _select_top_k(node: OnnxNode, x: torch.Tensor, count: Any) -> Any:
    """Return the `count` largest or smallest elements of an axis, and any requested indices."""
    (k,) = to_integers(node, count, "number of elements")
    axis = read_axis(node, x.ndim, -1)
    values, indices = torch.topk(
        x, k, axis, largest=bool(node.get("largest", 1)), sorted=bool(node.get("sorted", 1))
    )
    return (values, indices) if node.output_count > 1 else values


# -- products ----------------------------------------------------------------------------------


@register_operator("MatMul", weights=(1,))
def _compute_matmul(_: OnnxNode, x: Any, y: Any) -> torch.Tensor:
    x, y = to_tensors(x, y)
    return torch.matmul(x, y)


@register_operator("Gemm", weights=(1, 2))
def _compute_gemm(node: OnnxNode, x: Any, w: Any, c: Any = None) -> torch.Tensor:
    """Return ``alpha x w + beta c``; ``transA`` and ``transB`` transpose `x` and `w` first."""
    x, w, c = to_tensors(x, w, c)
    x = x.T if node.get("transA", 0) else x
    w = w if node.get("transB", 0) else w.T
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if alpha == 1.0 and (c is None or (beta == 1.0 and c.shape == w.shape[:1])):
        return functional.linear(x, w, c)
    y = functional.linear(x, w)
    y = y if alpha == 1.0 else alpha * y
    return y if c is None else y + (c if beta == 1.0 else beta * c)


@register_operator("Einsum")
def _compute_einsum(node: OnnxNode, *values: Any) -> torch.Tensor:
    return torch.einsum(node.get("equation"), *to_tensors(*values))


# -- normalization -----------------------------------------------------------------------------


@register_operator("BatchNormalization", weights=(1, 2), statistics=(3, 4), first_output_only=True)
def _compute_batch_norm(node: OnnxNode, x: torch.Tensor, *parameters: Any) -> Any:
    """Normalize by the batch in training mode, which updates the running statistics, else by these.

    ONNX's momentum weights the old statistics, PyTorch's the new ones.
    """
    scale, bias, mean, variance = (to_tensor(value, x) for value in parameters)
    momentum, epsilon = 1 - node.get("momentum", 0.9), node.get("epsilon", 1e-5)
    return node.pad_outputs(
        functional.batch_norm(x, mean, variance, scale, bias, node.training, momentum, epsilon)
    )


@register_operator("LayerNormalization", weights=(1, 2), first_output_only=True)
def _compute_layer_norm(node: OnnxNode, x: torch.Tensor, scale: Any, bias: Any = None) -> Any:
    """Normalize over the axes from ``axis`` on; scale and bias may be broadcast to these axes."""
    shape = x.shape[read_axis(node, x.ndim, -1) :]
    epsilon = node.get("epsilon", 1e-5)
    scale = to_tensor(scale, x)
    bias = None if bias is None else to_tensor(bias, x)
    if scale.shape == shape and (bias is None or bias.shape == shape):
        return node.pad_outputs(functional.layer_norm(x, shape, scale, bias, epsilon))
    y = functional.layer_norm(x, shape, eps=epsilon) * scale
    return node.pad_outputs(y if bias is None else y + bias)


@register_operator("RMSNormalization", weights=(1,))
def _compute_rms_norm(node: OnnxNode, x: torch.Tensor, scale: Any) -> torch.Tensor:
    """Divide by the root mean square over the axes from ``axis`` on, and multiply by `scale`."""
    axes = list(range(read_axis(node, x.ndim, -1), x.ndim))
    mean = (x * x).mean(axes, keepdim=True)
    return x * torch.rsqrt(mean + node.get("epsilon", 1e-5)) * to_tensor(scale, x)


@register_operator("InstanceNormalization", weights=(1, 2))
def _compute_instance_norm(node: OnnxNode, x: torch.Tensor, scale: Any, bias: Any) -> torch.Tensor:
    """Normalize each channel of each example separately; then apply scale and bias."""
    return functional.group_norm(
        x, x.shape[1], to_tensor(scale, x), to_tensor(bias, x), node.get("epsilon", 1e-5)
    )


_CHANNEL_SCALE_OPSET = 21
"""From this opset, scale and bias of a group norm have an element per channel, not per group."""


@register_operator("GroupNormalization", weights=(1, 2))
def _compute_group_norm(node: OnnxNode, x: torch.Tensor, scale: Any, bias: Any) -> torch.Tensor:
    """Normalize groups of channels; before opset 21, each group has one scale and one bias."""
    groups = node.get("num_groups")
    scale, bias = to_tensor(scale, x), to_tensor(bias, x)
    if node.opset < _CHANNEL_SCALE_OPSET:
        group_size = x.shape[1] // groups
        scale, bias = (
            v.reshape(groups, 1).expand(groups, group_size).reshape(-1) for v in (scale, bias)
        )
    return functional.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


@register_operator("MeanVarianceNormalization")
def _compute_mean_variance_norm(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Return ``(x - mean) / (deviation + 1e-9)``; the gradient is finite for constant `x`."""
    axes = [axis % x.ndim for axis in node.get("axes", (0, 2, 3))]
    mean = x.mean(axes, keepdim=True)
    centred, count = x - mean, x.numel() // max(mean.numel(), 1)
    deviation = torch.linalg.vector_norm(centred, 2, axes, keepdim=True) / math.sqrt(count)
    return centred / (deviation + 1e-9)


@register_operator("LpNormalization")
def _divide_by_norm(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Divide by the norm along an axis; where the norm is 0, the elements stay zeros."""
    axis = read_axis(node, x.ndim, -1)
    norm = torch.linalg.vector_norm(x, node.get("p", 2), [axis], keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


@register_operator("LRN")
def _compute_local_response_norm(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Return ``x / (bias + alpha / size * total) ** beta``.

    `total` sums squares from ``(size - 1) // 2`` channels before to ``size // 2`` after each.
    """
    size = node.get("size")
    channels_before = math.floor((size - 1) / 2)
    pads = [0, 0] * (x.ndim - 2) + [channels_before, size - 1 - channels_before]
    squares = functional.pad(x * x, pads)
    total = sum(squares.narrow(1, k, x.shape[1]) for k in range(size))
    scale = node.get("bias", 1.0) + node.get("alpha", 1e-4) / size * total
    return x / scale ** node.get("beta", 0.75)
