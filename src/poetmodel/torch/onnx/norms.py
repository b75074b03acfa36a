"""Operators that normalize."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import OnnxNode, axis_of, operator, tensor


@operator("BatchNormalization", weights=(1, 2), statistics=(3, 4))
def _batch_norm(node: OnnxNode, x: torch.Tensor, *given: Any) -> Any:
    """Normalize by the batch while the module trains, else by the running statistics.

    The momentum of ONNX is the share of the old statistics, that of PyTorch is that of the new.
    """
    scale, bias, mean, variance = (tensor(value, x) for value in given)
    momentum, epsilon = 1 - node.get("momentum", 0.9), node.get("epsilon", 1e-5)
    return node.only_first(
        functional.batch_norm(x, mean, variance, scale, bias, node.training, momentum, epsilon)
    )


@operator("LayerNormalization", weights=(1, 2))
def _layer_norm(node: OnnxNode, x: torch.Tensor, scale: Any, bias: Any = None) -> Any:
    shape = x.shape[axis_of(node, x.ndim, -1) :]
    epsilon = node.get("epsilon", 1e-5)
    scale = tensor(scale, x)
    bias = None if bias is None else tensor(bias, x)
    if scale.shape == shape and (bias is None or bias.shape == shape):
        return node.only_first(functional.layer_norm(x, shape, scale, bias, epsilon))
    y = functional.layer_norm(x, shape, eps=epsilon) * scale
    return node.only_first(y if bias is None else y + bias)


@operator("RMSNormalization", weights=(1,))
def _rms_norm(node: OnnxNode, x: torch.Tensor, scale: Any) -> torch.Tensor:
    axes = list(range(axis_of(node, x.ndim, -1), x.ndim))
    mean = (x * x).mean(axes, keepdim=True)
    return x * torch.rsqrt(mean + node.get("epsilon", 1e-5)) * tensor(scale, x)


@operator("InstanceNormalization", weights=(1, 2))
def _instance_norm(node: OnnxNode, x: torch.Tensor, scale: Any, bias: Any) -> torch.Tensor:
    return functional.group_norm(
        x, x.shape[1], tensor(scale, x), tensor(bias, x), node.get("epsilon", 1e-5)
    )


_OF_CHANNELS = 21
"""The opset from which on scale and bias of a group norm are those of channels, not of groups."""


@operator("GroupNormalization", weights=(1, 2))
def _group_norm(node: OnnxNode, x: torch.Tensor, scale: Any, bias: Any) -> torch.Tensor:
    groups = node.get("num_groups")
    scale, bias = tensor(scale, x), tensor(bias, x)
    if node.opset < _OF_CHANNELS:
        per_group = x.shape[1] // groups
        scale, bias = (
            v.reshape(groups, 1).expand(groups, per_group).reshape(-1) for v in (scale, bias)
        )
    return functional.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


@operator("MeanVarianceNormalization")
def _standardized(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    axes = list(node.get("axes", (0, 2, 3)))
    apart = x - x.mean(axes, keepdim=True)
    return apart / ((apart * apart).mean(axes, keepdim=True).sqrt() + 1e-9)


@operator("LpNormalization")
def _lp_norm(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    axis, p = axis_of(node, x.ndim, -1), node.get("p", 2)
    norm = torch.linalg.vector_norm(x, p, [axis], keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


@operator("LRN")
def _local_response(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Divide by the squares of neighbouring channels."""
    size = node.get("size")
    before = math.floor((size - 1) / 2)
    pads = [0, 0] * (x.ndim - 2) + [before, size - 1 - before]
    squares = functional.pad(x * x, pads)
    total = sum(squares.narrow(1, k, x.shape[1]) for k in range(size))
    scale = node.get("bias", 1.0) + node.get("alpha", 1e-4) / size * total
    return x / scale ** node.get("beta", 0.75)
