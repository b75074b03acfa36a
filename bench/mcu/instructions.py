"""Measure the instruction table for estimates of exported steps, by counts of an emulator.

``python -m mcu.instructions`` in ``bench`` writes ``src/poetmodel/lowered/instructions.json``, in
minutes; with ``--new`` it adds the kernels that this lacks. Needs PyTorch, GCC for Arm and QEMU.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn
from torch.nn import functional

import poetmodel.lowered
from mcu.networks import NETWORKS
from mcu.quantized import INT8, Layers, square
from poetmodel.device import Device
from poetmodel.export.measuring import measure_emulated
from poetmodel.lowered.instructions import (
    OTHER_KERNELS,
    TABLE_FILE,
    count_work,
    find_computing_calls,
)
from poetmodel.tiling.choice import divide_step
from poetmodel.torch import QuantizedSGD
from poetmodel.torch import quantized as quantize
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.lowered.step import LoweredStep

DEVICE: Final = replace(Device.load("nrf52840"), flash=None)
TOO_LARGE: Final = "mobilenetv2-035"
"""A network whose keep-all step does not fit the emulated board."""
DIGITS: Final = 4
"""Significant digits of the table."""
ROUNDING: Final = 100
"""Error of short calls [instructions]; the clock counts in steps of 40."""
COMMON: Final = ("call", "row", "element", "result")
"""Entries of kernels that no step here calls: medians of the other kernels."""

FUNCTIONS: Final[Sequence[Callable[[torch.Tensor], torch.Tensor]]] = (
    torch.abs, torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.erf, torch.ceil,
    torch.floor, torch.round, torch.sign, torch.expm1, functional.relu, functional.elu,
    functional.gelu, functional.silu, functional.mish, functional.softplus, functional.softshrink,
    functional.hardshrink, functional.hardsigmoid, functional.hardswish, functional.hardtanh,
    functional.leaky_relu, functional.logsigmoid, lambda x: functional.gelu(x, approximate="tanh"),
    lambda x: x.clamp(-0.5, 0.5), lambda x: x**3, lambda x: x * x, lambda x: x + 2.5,
    lambda x: torch.sqrt(1 + x * x), lambda x: torch.rsqrt(1 + x * x), lambda x: 1 / (2 + x * x),
    lambda x: torch.log(1 + x * x), lambda x: torch.log1p(x * x), lambda x: (1 + x * x) ** 0.3,
    lambda x: x / (3 + x * x), lambda x: torch.maximum(x, -x), lambda x: torch.minimum(x, -x),
    lambda x: torch.where(x > 0, x, 2 * x), lambda x: torch.lerp(x, -x, 0.3),
    lambda x: torch.addcmul(x, x, x), lambda x: torch.addcdiv(x, x, 3 + x * x),
    lambda x: x.masked_fill(x > 0, 1.0), lambda x: x.softmax(-1), lambda x: x.log_softmax(-1),
    lambda x: x.cumsum(-1), lambda x: x.t().contiguous().t(), lambda x: x - x.sum(0),
    lambda x: x - x.mean(-1, keepdim=True), lambda x: x.tril(),
    lambda x: x - x.amax(-1, keepdim=True), lambda x: x - x.logsumexp(-1, keepdim=True),
    lambda x: x - x.var(-1, keepdim=True), lambda x: x - x.norm(dim=-1, keepdim=True),
    lambda x: torch.cat((x[:, 1:], x[:, :1]), 1),
    lambda x: functional.dropout(x, 0.3, training=True),
)  # fmt: skip
"""Functions of a matrix with results of the same size."""
LOSSES: Final[Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = (
    functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
    lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y),
)  # fmt: skip


class Functions(nn.Module):  # type: ignore[misc, unused-ignore]
    """A linear layer, and the sum of `FUNCTIONS` of its result."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.slope = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        y = 0.1 * self.layer(x)
        total = self.slope(y)
        for function in FUNCTIONS:
            total = total + function(y)
        return total


def every_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of all losses."""
    return torch.stack([loss(x, y) for loss in LOSSES]).sum()


def planes(width: int, groups: int) -> nn.Module:
    """Return image layers with several windows, strides, groups, pools and norms."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 5, padding=2), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, groups=groups), nn.GroupNorm(2, width), nn.AvgPool2d(2)),
        *(nn.Conv2d(width, width + 3, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(3, 1, 1)),
        *(nn.Upsample(scale_factor=2), nn.ConvTranspose2d(width + 3, 5, 3, stride=2), nn.Tanh()),
        *(nn.Conv2d(5, width, 3, padding=2, dilation=2), nn.ReLU6()),
        *(nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.ReflectionPad2d(1)),
        *(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LeakyReLU()),
        *(nn.AvgPool2d(3, 1, 1), nn.Hardsigmoid(), nn.Conv2d(width, 9, 1), settled(9)),
        *(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(81, 7)),
    )


def settled(width: int) -> nn.Module:
    """Return a batch norm in evaluation mode of which only the bias is trained."""
    norm = nn.BatchNorm2d(width).eval()
    norm.weight.requires_grad_(requires_grad=False)
    return norm


def optimizers(parameters: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    """Yield optimizers with each kind of update, first two of SGD."""
    yield torch.optim.SGD(parameters, lr=0.01, weight_decay=0.1)
    yield torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    yield torch.optim.Adam(parameters, lr=0.01)
    yield torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)
    for rule in (torch.optim.NAdam, torch.optim.Adamax, torch.optim.RAdam, torch.optim.Adagrad):
        yield rule(parameters, lr=0.01)
    for momentum, centered in product((0, 0.9), (False, True)):
        yield torch.optim.RMSprop(parameters, lr=0.01, momentum=momentum, centered=centered)


def perceptron(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (nn.ReLU(), layer)))


def steps() -> Iterator[LoweredStep]:
    """Yield the steps whose nodes are measured."""
    entropy = functional.cross_entropy
    for (rows, width), masks in product(((3, 10), (9, 31)), (True, False)):
        inputs = (torch.randn(rows, 6), torch.rand(rows, width))
        yield lowered(Functions(6, width), every_loss, inputs, masks=masks)
    images = ((1, 15, 8, 2), (2, 20, 6, 1), (3, 12, 12, 3))
    for (batch, size, width, groups), masks in product(images, (True, False)):
        inputs = (torch.randn(batch, 3, size, size), torch.randint(0, 7, (batch,)))
        yield lowered(planes(width, groups), entropy, inputs, masks=masks)
        model = planes(width, groups)
        for optimizer in islice(optimizers(list(model.parameters())), 2):
            yield lowered(model, entropy, inputs, optimizer, masks=masks)
    yield from bytes_of_images()
    for batch in (1, 3, 8):
        inputs = (torch.randn(batch, 37), torch.randint(0, 9, (batch,)))
        yield lowered(perceptron(37, 50, 33, 9), entropy, inputs)
    for batch in (1, 6):
        model = perceptron(37, 300, 9)
        inputs = (torch.randn(batch, 37), torch.randint(0, 9, (batch,)))
        yield divide_step(lowered(model, entropy, inputs), "1KiB")
        for optimizer in optimizers(list(model.parameters())):
            yield lowered(model, entropy, inputs, optimizer)
    for name, make in NETWORKS.items():
        if name == TOO_LARGE:
            continue
        torch.manual_seed(0)
        step = lowered(*make())
        yield step
        if name in ("ds-cnn", "autoencoder", "resnet8-thin"):
            yield divide_step(step, "4KiB")
    yield quantized().step()
    yield from int8_training()


def int8_training() -> Iterator[LoweredStep]:
    """Yield steps with trained int8 weights, with updates and with returned gradients."""
    for batch, size, width in ((1, 17, 8), (2, 12, 13), (4, 7, 20)):
        torch.manual_seed(0)
        given = torch.randn(batch, 3, size, size)
        model = quantize(every_layer(width).eval(), [given], train="all")
        inputs = (given, torch.randint(0, 5, (batch,)))
        for decay in (0.0, 0.1):
            rule = QuantizedSGD(model, lr=0.1, weight_decay=decay)
            step = lower(model, functional.cross_entropy, inputs, optimizer=rule)
            yield step
            yield divide_step(step, "1KiB" if decay else "4KiB")
        yield lower(model, functional.cross_entropy, inputs)
        rounded = quantize(every_layer(width).eval(), [given], train="all", rounding="stochastic")
        for each in (model, rounded):
            rule = QuantizedSGD(each, lr=0.1)
            yield lower(each, functional.cross_entropy, inputs, optimizer=rule, clip_grad_norm=1.0)
        for decay in (0.0, 0.1):
            rule = QuantizedSGD(rounded, lr=0.1, weight_decay=decay)
            yield lower(rounded, functional.cross_entropy, inputs, optimizer=rule)


def every_layer(width: int) -> nn.Module:
    """Return int8 layers with a backward pass, of many shapes."""
    wide, narrow = 3 * width, width // 2

    def conv(*sizes: int, groups: int = 1, stride: int = 1) -> tuple[nn.Module, nn.Module]:
        into, out, window = sizes
        return nn.Conv2d(into, out, window, stride, window // 2, groups=groups), nn.ReLU6()

    return nn.Sequential(
        *conv(3, width, 3, stride=2), *conv(width, width, 3, groups=width),
        *conv(width, 2 * width, 1), *conv(2 * width, narrow, 3), *conv(narrow, 5, 5),
        *conv(5, wide, 1), nn.MaxPool2d(3, 2, 1), *conv(wide, wide, 3, groups=wide, stride=2),
        *conv(wide, wide, 5, groups=wide), *conv(wide, 9, 3, groups=3), nn.AvgPool2d(3, 1, 1),
        *conv(9, 2 * wide, 1), nn.MaxPool2d(2, 1, 1), *conv(2 * wide, 7, 1), nn.AvgPool2d(2, 1),
        nn.MaxPool2d(3, 1, 1), *conv(7, width, 3),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 33), nn.ReLU()),
        nn.Linear(33, 5),
    )  # fmt: skip


def quantized() -> Layers:
    """Return int8 layers of many shapes, with and without limits."""
    layers = Layers()
    for limits, (batch, channels, size) in product(
        (INT8, (-128, 99)), ((1, 8, 9), (2, 13, 6), (1, 40, 3), (3, 3, 12))
    ):
        given: dict[str, Any] = {"batch": batch, "limits": limits}
        for results in (1, 6, 21):
            layers.layer("pm_q8_pointwise", square(channels, results, size), **given)
            layers.layer("pm_q8_conv2d", square(channels, results, size, 3, 2), **given)
            layers.layer("pm_q8_conv2d", square(channels, results, size, 5), **given)
            two = square(2 * channels, 2 * results, size, 3, groups=2)
            layers.layer("pm_q8_conv2d", two, **given)
        for window, stride in product((1, 3, 5), (1, 2)):
            own = square(channels, channels, size, window, stride, channels)
            layers.layer("pm_q8_depthwise", own, **given)
            layers.pool("pm_q8_average", own, **given)
            layers.pool("pm_q8_maximum", own, batch)
        for width, results, across in ((96, 24, size), (300, 40, 1), (500, 7, 2)):
            layers.layer("pm_q8_pointwise", square(width, results, across), **given)
        layers.add(batch * channels * size, limits=limits)
        layers.quantize(batch, channels, size * size)
        layers.dequantize(batch, channels, size * size)
        layers.lookup(batch, channels, size * size)
    return layers


class Normalized(nn.Module):  # type: ignore[misc, unused-ignore]
    """A convolution on byte images with normalized channels."""

    def __init__(self, channels: int, *, alike: bool) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.rand(1 if alike else channels, 1, 1))
        self.layer = nn.Conv2d(channels, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of each channel of its results."""
        return self.layer(x.float() / 255 - self.mean).mean((2, 3))


def bytes_of_images() -> Iterator[LoweredStep]:
    """Yield steps with lookup tables for byte inputs."""
    for alike, channels, size in product((True, False), (1, 3), (5, 12, 31)):
        images = torch.randint(0, 256, (2, channels, size, size), dtype=torch.uint8)
        model = Normalized(channels, alike=alike)
        yield lowered(model, functional.cross_entropy, (images, torch.tensor([0, 3])))


def lowered(
    model: nn.Module,
    loss: Any,
    inputs: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    masks: bool = True,
) -> LoweredStep:
    """Return a lowered step, updated by plain SGD unless `optimizer` is given."""
    rule = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    return lower(model, loss, inputs, optimizer=rule, masks=masks)


def fitted(samples: Sequence[tuple[Counter[tuple[str, str]], int]]) -> dict[str, dict[str, float]]:
    """Fit the instructions of each kernel and repeated loop by least relative errors."""
    columns = sorted({column for counts, _ in samples for column in counts})
    index = {column: k for k, column in enumerate(columns)}
    matrix = np.zeros((len(samples), len(columns)))
    for row, (counts, instructions) in enumerate(samples):
        for column, count in counts.items():
            matrix[row, index[column]] = count / (instructions + ROUNDING)
    wanted = np.array([n / (n + ROUNDING) for _, n in samples])
    scales = np.maximum(np.linalg.norm(matrix, axis=0), 1e-12)
    values = nnls(matrix / scales, wanted, maxiter=100 * len(columns))[0] / scales
    found: dict[str, dict[str, float]] = {}
    for (kernel, what), value in zip(columns, values, strict=True):
        each = found.setdefault(kernel, {})
        if value:
            each[what] = float(f"{value:.{DIGITS}g}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Count instructions, fit the table and write it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(poetmodel.lowered.__file__).parent / TABLE_FILE
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--new", action="store_true", help="rows that the table has stay")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    samples = []
    for step in steps():
        counts = measure_emulated(step, device=DEVICE).instructions
        for node, calls in zip(step.graph.nodes, step.calls, strict=True):
            if node.is_state:
                continue
            work: Counter[tuple[str, str]] = Counter()
            for call in find_computing_calls(node, calls):
                kernel, repeated = count_work(call)
                work.update({(kernel, what): n for what, n in repeated.items()})
            samples.append((work, counts[node.name]))
        logging.info("%s: %d nodes so far", step.graph.name, len(samples))
    table = fitted(samples)
    known = [[row[what] for row in table.values() if what in row] for what in COMMON]
    table[OTHER_KERNELS] = {
        what: float(f"{median(values):.{DIGITS}g}")
        for what, values in zip(COMMON, known, strict=True)
    }
    if options.new:
        table |= json.loads(default.read_text(encoding="utf-8"))
    text = json.dumps(table, indent=0, sort_keys=True)
    options.out.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
