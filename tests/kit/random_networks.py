"""Small random networks to train: layers, widths, losses; needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from kit.traced_models import Through

if TYPE_CHECKING:
    from collections.abc import Callable

Draw = Any

_ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Hardtanh, nn.LeakyReLU, nn.ReLU6,
)  # fmt: skip


@st.composite
def trainings(draw: Draw) -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    """Draw a model of a few layers on images, signals or rows, its loss, and inputs."""
    torch.manual_seed(draw(st.integers(0, 99)))
    batch = draw(st.integers(2, 3))
    dimensions = draw(st.sampled_from((0, 1, 2)))
    channels = draw(st.integers(1, 4))
    sizes = tuple(draw(st.integers(4, 7)) for _ in range(dimensions))
    x = torch.randn(batch, channels if dimensions else draw(st.integers(2, 9)), *sizes)
    layers: list[nn.Module] = []
    y = x
    for _ in range(draw(st.integers(1, 5))):
        layer = _layer(draw, y)
        with torch.no_grad():
            y = layer(y)
        layers.append(layer)
    loss, head, target = _end(draw, y)
    return nn.Sequential(*layers, *head), loss, (x, target)


def _layer(draw: Draw, x: torch.Tensor) -> nn.Module:
    kinds = ["activation", "linear", "residual", "layer norm"]
    if x.ndim > 2:
        kinds += ["convolution", "convolution", "depthwise", "norm", "joined", "upsampled"]
        kinds += ["pooled"] * (min(x.shape[2:]) > 1)
    else:
        kinds.append("norm")
    return _make(draw, draw(st.sampled_from(kinds)), x)


def _make(draw: Draw, kind: str, x: torch.Tensor) -> nn.Module:
    flat = x.ndim - 2
    width = x.shape[1]
    if kind == "activation":
        return draw(st.sampled_from(_ACTIVATIONS))()
    if kind == "linear":
        return nn.Linear(x.shape[-1], draw(st.integers(2, 7)), bias=draw(st.booleans()))
    if kind == "layer norm":
        return nn.LayerNorm(x.shape[-1])
    if kind == "norm":
        return (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[flat](width)
    if kind == "residual":
        inner = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), nn.Tanh())
        return Through(lambda parts, y: y + parts[0](y) * 0.5, inner)
    convolution: Any = (nn.Conv1d, nn.Conv2d)[flat - 1]
    if kind == "joined":
        inner = convolution(width, 2, 3, padding=1)
        return Through(lambda parts, y: torch.cat((y, parts[0](y)), 1), inner)
    if kind == "upsampled":
        return nn.Upsample(scale_factor=2) if flat == 2 else nn.Identity()
    if kind == "pooled":
        pools: Any = ((nn.MaxPool1d, nn.AvgPool1d), (nn.MaxPool2d, nn.AvgPool2d))[flat - 1]
        return draw(st.sampled_from(pools))(2)
    size, padding = draw(st.integers(1, 3)), draw(st.integers(0, 1))
    while min(x.shape[2:]) + 2 * padding < size:
        size -= 1
    groups = width if kind == "depthwise" else 1
    out = width * draw(st.integers(1, 2)) if kind == "depthwise" else draw(st.integers(1, 5))
    return convolution(
        width, out, size, draw(st.integers(1, 2)), min(padding, size - 1), groups=groups,
        bias=draw(st.booleans()),
    )  # fmt: skip


def _end(draw: Draw, y: torch.Tensor) -> tuple[Any, list[nn.Module], torch.Tensor]:
    kind = draw(st.sampled_from(("classes", "numbers", "global pool")))
    if kind == "numbers":
        last = nn.Linear(y.shape[-1], 3)
        return functional.mse_loss, [last], torch.randn(*y.shape[:-1], 3)
    head: list[nn.Module] = [nn.Flatten(1), nn.Linear(y[0].numel(), 4)]
    if kind == "global pool" and y.ndim == 4:
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(y.shape[1], 4)]
    return functional.cross_entropy, head, torch.randint(0, 4, (len(y),))
