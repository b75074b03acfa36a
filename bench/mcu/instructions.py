"""Measure the instruction table for estimates of exported steps, by counts of an emulator.

``python -m mcu.instructions`` in ``bench`` takes minutes and writes
``src/poetmodel/lowered/instructions.json``; with ``--new`` it measures only kernels that are
missing there. Networks call most kernels; one over elements that none of them calls, or that is
new, is called on random numbers, another as its tests call it. Needs PyTorch, GCC for Arm and QEMU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import nn
from torch.nn import functional

import poetmodel.lowered
from mcu.networks import NETWORKS
from mcu.quantized import INT8, Layers, is_over_elements, square_sizes
from poetmodel.device import Device
from poetmodel.export.measuring import measure_emulated
from poetmodel.lowered.calls import WORKSPACE
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.instructions import (
    OTHER_KERNELS,
    TABLE_FILE,
    count_work,
    estimate_call_instructions,
    find_computing_calls,
)
from poetmodel.lowered.kernels import find_kernel
from poetmodel.tiling.choice import divide_step
from poetmodel.torch import QuantizedSGD
from poetmodel.torch import quantized as quantize
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.step import LoweredStep

DEVICE: Final = replace(Device.load("nrf52840"), flash=None)
"""A board with a Cortex-M4, without a limit of flash."""
TOO_LARGE: Final = "mobilenetv2-035"
"""A network whose keep-all step does not fit the emulated board."""
DIGITS: Final = 4
"""Significant digits of the table."""
CLOCK_ERROR: Final = 100
"""Error allowed for short calls [instructions], because the clock counts in steps of 40."""
CHECKS: Final = {"pm_clip_factor": {"call": 16.0}, "pm_finite": {"call": 11.0, "element": 7.0}}
"""Rows of a call that is too short to fit, repeated alone, and of the checks of inputs, which no
node has: counted in the code that GCC makes of them."""
LEAST_UNITS: Final = 50
"""Units of the largest call of a kernel that is measured as its tests call it."""
REPEATS: Final = 16
"""Times that a node executes a call of a kernel that no node calls without others."""
REPEATED_STEPS: Final = 3
"""Steps in which the calls of such a kernel are repeated."""
MOST_CALLS: Final = 16
"""Calls that are measured of a kernel as its tests call it."""
COMMON_ENTRIES: Final = ("call", "row", "element", "result")
"""Entries of the row for unmeasured kernels; each is the median of the measured kernels."""

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
    """A linear layer, and the sum of all `FUNCTIONS` and a PReLU of its result."""

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


def sum_losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of all `LOSSES`."""
    return torch.stack([loss(x, y) for loss in LOSSES]).sum()


def make_image_layers(width: int, groups: int) -> nn.Module:
    """Return a classifier of images with several windows, strides, groups, pools and norms."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 5, padding=2), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, groups=groups), nn.GroupNorm(2, width), nn.AvgPool2d(2)),
        *(nn.Conv2d(width, width + 3, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(3, 1, 1)),
        *(nn.Upsample(scale_factor=2), nn.ConvTranspose2d(width + 3, 5, 3, stride=2), nn.Tanh()),
        *(nn.Conv2d(5, width, 3, padding=2, dilation=2), nn.ReLU6()),
        *(nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.ReflectionPad2d(1)),
        *(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LeakyReLU()),
        *(nn.AvgPool2d(3, 1, 1), nn.Hardsigmoid(), nn.Conv2d(width, 9, 1), make_frozen_norm(9)),
        *(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(81, 7)),
    )


def make_frozen_norm(width: int) -> nn.Module:
    """Return a batch norm in evaluation mode with a frozen weight and a trained bias."""
    norm = nn.BatchNorm2d(width).eval()
    norm.weight.requires_grad_(requires_grad=False)
    return norm


def make_optimizers(parameters: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    """Yield optimizers with each kind of update; the first two are SGD."""
    yield torch.optim.SGD(parameters, lr=0.01, weight_decay=0.1)
    yield torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    yield torch.optim.Adam(parameters, lr=0.01)
    yield torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)
    for rule in (torch.optim.NAdam, torch.optim.Adamax, torch.optim.RAdam, torch.optim.Adagrad):
        yield rule(parameters, lr=0.01)
    for momentum, centered in product((0, 0.9), (False, True)):
        yield torch.optim.RMSprop(parameters, lr=0.01, momentum=momentum, centered=centered)


def make_perceptron(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths, each after a ReLU."""
    layers = [
        nn.Linear(input_width, output_width) for input_width, output_width in pairwise(widths)
    ]
    return nn.Sequential(*(module for layer in layers for module in (nn.ReLU(), layer)))


def make_steps(known: Collection[str]) -> Iterator[LoweredStep]:
    """Yield steps that together call all kernels but the `known` ones, if there is a way.

    Those of networks come first, but last for a few kernels that are not known yet.
    """
    missing = {
        name
        for name in CATALOGUE.keys() - known
        if any(parameter.is_written for parameter in find_kernel(name).parameters)
    }
    if known:
        yield (step := make_direct_step(missing))
        missing -= list_kernels(step)
    for step in make_network_steps() if missing else ():
        missing -= list_kernels(step)
        yield step
    if not known:
        yield make_direct_step(missing)


def make_direct_step(kernels: Collection[str]) -> LoweredStep:
    """Return a step that calls kernels over elements on random numbers, others as their tests."""
    layers = Layers()
    layers.add_elements("pm_copy", 16)
    for kernel in sorted(kernels):
        if is_over_elements(kernel):
            for n, rows in ((7, 1), (40, 1), (300, 1), (7, 9), (5, 40)):
                layers.add_elements(kernel, n, rows=rows, limits=INT8)
        else:
            add_tested_calls(layers, kernel)
    return layers.build_step()


def list_kernels(step: LoweredStep) -> set[str]:
    """Return the kernels that compute in a step."""
    return {
        call.kernel for node, calls in step.operations for call in find_computing_calls(node, calls)
    }


@cache
def run_kernel_tests() -> Sequence[TestedCall]:
    """Return the calls that the tests of kernels execute, each kernel's largest first."""
    recorder = Recorder()
    tests = Path(__file__).resolve().parents[2] / "tests" / "export"
    files = map(str, sorted(tests.glob("test_kernels_[!q]*.py")))  # int8 ones are of `Layers`
    options = ("-q", "-k", "not build and not training", "-p", "no:cacheprovider", "-p", "no:xdist")
    pytest.main([*options, *files], [recorder])
    return sorted(recorder.calls, key=lambda tested: -sum(count_work(tested.call)[1].values()))


def add_tested_calls(layers: Layers, kernel: str) -> None:
    """Add calls of a kernel as its tests make them, if these tell its units apart.

    That takes as many different calls as there are units, and a large one if sizes differ.
    """
    found: list[tuple[Counter[str], TestedCall]] = []
    for tested in run_kernel_tests():
        if tested.call.kernel == kernel:
            units = count_work(tested.call)[1]
            if all(units != others for others, _ in found):
                found.append((units, tested))
    units = found[0][0] if found else Counter[str]()
    if len(found) >= len(units) and (len(units) == 1 or sum(units.values()) >= LEAST_UNITS):
        for _, tested in found[:MOST_CALLS]:
            layers.add_recorded(tested.call, tested.values)


class TestedCall(NamedTuple):
    """A call that a test executed, with the values of the buffers before it."""

    call: Call
    values: Mapping[str, np.ndarray]


class Recorder:
    """A plugin of pytest that records calls with one result, not in place."""

    def __init__(self) -> None:
        self.calls: list[TestedCall] = []

    def pytest_collection_finish(self) -> None:
        """Record what the memory of tests executes from now on."""
        memory_type = importlib.import_module("kit.kernel_calls").Memory
        execute_call = memory_type.execute_call

        def record_call(memory: Any, call: Call) -> None:
            reads = [ref.buffer for ref in call.refs if ref not in call.writes]
            if len(call.writes) == 1 and {*reads}.isdisjoint((WORKSPACE, call.writes[0].buffer)):
                values = {name: memory[name].copy() for name in call.buffers}
                if all(np.isfinite(values[name]).all() for name in reads):
                    self.calls.append(TestedCall(call, values))
            execute_call(memory, call)

        memory_type.execute_call = record_call


def make_network_steps() -> Iterator[LoweredStep]:
    """Yield the steps of networks and of int8 layers."""
    cross_entropy = functional.cross_entropy
    for (rows, width), masks in product(((3, 10), (9, 31)), (True, False)):
        inputs = (torch.randn(rows, 6), torch.rand(rows, width))
        yield lower_with_optimizer(Functions(6, width), sum_losses, inputs, masks=masks)
    images = ((1, 15, 8, 2), (2, 20, 6, 1), (3, 12, 12, 3))
    for (batch, size, width, groups), masks in product(images, (True, False)):
        inputs = (torch.randn(batch, 3, size, size), torch.randint(0, 7, (batch,)))
        yield lower_with_optimizer(
            make_image_layers(width, groups), cross_entropy, inputs, masks=masks
        )
        model = make_image_layers(width, groups)
        for optimizer in islice(make_optimizers(list(model.parameters())), 2):
            yield lower_with_optimizer(model, cross_entropy, inputs, optimizer, masks=masks)
    yield from make_byte_image_steps()
    for batch in (1, 3, 8):
        inputs = (torch.randn(batch, 37), torch.randint(0, 9, (batch,)))
        yield lower_with_optimizer(make_perceptron(37, 50, 33, 9), cross_entropy, inputs)
    for batch in (1, 6):
        model = make_perceptron(37, 300, 9)
        inputs = (torch.randn(batch, 37), torch.randint(0, 9, (batch,)))
        yield divide_step(lower_with_optimizer(model, cross_entropy, inputs), "1KiB")
        for optimizer in make_optimizers(list(model.parameters())):
            yield lower_with_optimizer(model, cross_entropy, inputs, optimizer)
    for name, make_training in NETWORKS.items():
        if name == TOO_LARGE:
            continue
        torch.manual_seed(0)
        step = lower_with_optimizer(*make_training())
        yield step
        if name in ("ds-cnn", "autoencoder", "resnet8-thin"):
            yield divide_step(step, "4KiB")
    yield make_kernel_calls().build_step()
    yield from make_int8_steps()


def make_int8_steps() -> Iterator[LoweredStep]:
    """Yield steps with trained int8 weights, with updates and with returned gradients."""
    for batch, size, width in ((1, 17, 8), (2, 12, 13), (4, 7, 20)):
        torch.manual_seed(0)
        images = torch.randn(batch, 3, size, size)
        model = quantize(make_int8_layers(width).eval(), [images], train="all")
        inputs = (images, torch.randint(0, 5, (batch,)))
        for decay in (0.0, 0.1):
            optimizer = QuantizedSGD(model, lr=0.1, weight_decay=decay)
            step = lower(model, functional.cross_entropy, inputs, optimizer=optimizer)
            yield step
            yield divide_step(step, "1KiB" if decay else "4KiB")
        yield lower(model, functional.cross_entropy, inputs)
        stochastic_model = quantize(
            make_int8_layers(width).eval(), [images], train="all", rounding="stochastic"
        )
        for network in (model, stochastic_model):
            optimizer = QuantizedSGD(network, lr=0.1)
            yield lower(
                network, functional.cross_entropy, inputs, optimizer=optimizer, clip_grad_norm=1.0
            )
        for decay in (0.0, 0.1):
            optimizer = QuantizedSGD(stochastic_model, lr=0.1, weight_decay=decay)
            yield lower(stochastic_model, functional.cross_entropy, inputs, optimizer=optimizer)


def make_int8_layers(width: int) -> nn.Module:
    """Return a network of many shapes of int8 layers that have a backward pass."""
    wide, narrow = 3 * width, width // 2

    def conv(*sizes: int, groups: int = 1, stride: int = 1) -> tuple[nn.Module, nn.Module]:
        inputs, outputs, window = sizes
        return nn.Conv2d(inputs, outputs, window, stride, window // 2, groups=groups), nn.ReLU6()

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


def make_kernel_calls() -> Layers:
    """Return kernel calls of int8 layers of many shapes, with and without limits."""
    layers = Layers()
    for limits, (batch, channels, size) in product(
        (INT8, (-128, 99)), ((1, 8, 9), (2, 13, 6), (1, 40, 3), (3, 3, 12))
    ):
        options: dict[str, Any] = {"batch": batch, "limits": limits}
        for results in (1, 6, 21):
            layers.add_convolution(
                "pm_q8_pointwise", square_sizes(channels, results, size), **options
            )
            layers.add_convolution(
                "pm_q8_conv2d", square_sizes(channels, results, size, 3, 2), **options
            )
            layers.add_convolution(
                "pm_q8_conv2d", square_sizes(channels, results, size, 5), **options
            )
            grouped_sizes = square_sizes(2 * channels, 2 * results, size, 3, groups=2)
            layers.add_convolution("pm_q8_conv2d", grouped_sizes, **options)
        for window, stride in product((1, 3, 5), (1, 2)):
            channel_sizes = square_sizes(channels, channels, size, window, stride, channels)
            layers.add_convolution("pm_q8_depthwise", channel_sizes, **options)
            layers.add_pool("pm_q8_average", channel_sizes, **options)
            layers.add_pool("pm_q8_maximum", channel_sizes, batch)
        for width, results, side in ((96, 24, size), (300, 40, 1), (500, 7, 2)):
            layers.add_convolution("pm_q8_pointwise", square_sizes(width, results, side), **options)
        layers.add_elements("pm_q8_add", batch * channels * size, limits=limits)
        layers.add_quantization(batch, channels, size * size)
        layers.add_dequantization(batch, channels, size * size)
        layers.add_lookup(batch, channels, size * size)
    return layers


class Normalized(nn.Module):  # type: ignore[misc, unused-ignore]
    """A convolution on byte images, after subtraction of one mean, or one per channel."""

    def __init__(self, channels: int, *, has_one_mean: bool) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.rand(1 if has_one_mean else channels, 1, 1))
        self.layer = nn.Conv2d(channels, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of each channel after the convolution."""
        return self.layer(x.float() / 255 - self.mean).mean((2, 3))


def make_byte_image_steps() -> Iterator[LoweredStep]:
    """Yield steps with lookup tables for byte inputs."""
    for has_one_mean, channels, size in product((True, False), (1, 3), (5, 12, 31)):
        images = torch.randint(0, 256, (2, channels, size, size), dtype=torch.uint8)
        model = Normalized(channels, has_one_mean=has_one_mean)
        yield lower_with_optimizer(model, functional.cross_entropy, (images, torch.tensor([0, 3])))


def lower_with_optimizer(
    model: nn.Module,
    loss: Any,
    inputs: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    masks: bool = True,
) -> LoweredStep:
    """Lower a step that is updated by `optimizer`, by default plain SGD."""
    chosen_optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    return lower(model, loss, inputs, optimizer=chosen_optimizer, masks=masks)


def fit_instructions(
    samples: Sequence[tuple[Counter[tuple[str, str]], int]],
) -> dict[str, dict[str, float]]:
    """Fit the instructions of each kernel and repeated unit by least squares of relative errors.

    Samples are the units of a node, by (kernel, unit), and its instructions. Units with 0
    instructions are omitted.
    """
    if not samples:
        return {}
    columns = sorted({column for counts, _ in samples for column in counts})
    index = {column: k for k, column in enumerate(columns)}
    matrix = np.zeros((len(samples), len(columns)))
    for row, (counts, instructions) in enumerate(samples):
        for column, count in counts.items():
            matrix[row, index[column]] = count / (instructions + CLOCK_ERROR)
    targets = np.array([n / (n + CLOCK_ERROR) for _, n in samples])
    scales = np.maximum(np.linalg.norm(matrix, axis=0), 1e-12)
    values = nnls(matrix / scales, targets, maxiter=100 * len(columns))[0] / scales
    table: dict[str, dict[str, float]] = {}
    for (kernel, unit), value in zip(columns, values, strict=True):
        kernel_row = table.setdefault(kernel, {})
        if value:
            kernel_row[unit] = float(f"{value:.{DIGITS}g}")
    return table


def measure_step(
    step: LoweredStep, known: Collection[str]
) -> Iterator[tuple[Counter[tuple[str, str]], int]]:
    """Yield the units of each node that calls other kernels than `known`, and its instructions.

    Those of known kernels are estimated, and left out.
    """
    counts = measure_emulated(step, device=DEVICE).instructions
    for node, calls in step.operations:
        units: Counter[tuple[str, str]] = Counter()
        known_instructions = 0.0
        for call in find_computing_calls(node, calls):
            if call.kernel in known:
                known_instructions += estimate_call_instructions(call)
                continue
            kernel, repeated = count_work(call)
            units.update({(kernel, unit): count for unit, count in repeated.items()})
        if units:
            yield units, max(0, counts[node.name] - round(known_instructions))


def measure_kernels(known: Collection[str]) -> dict[str, dict[str, float]]:
    """Measure and fit the rows of all kernels but the `known` ones.

    Kernels that nodes call only beside others are repeated in a few steps: a fit of equal numbers
    of calls could give all instructions to one of them.
    """
    samples: list[tuple[Counter[tuple[str, str]], int]] = []
    steps = [step for step in make_steps(known) if not list_kernels(step) <= {*known}]
    for step in steps:
        samples += measure_step(step, known)
        logging.info("%s: %d nodes so far", step.graph.name, len(samples))
    for kernel in sorted(find_accompanied(steps) - {*known}):
        with_kernel = (step for step in steps if kernel in list_kernels(step))
        for step in islice(with_kernel, REPEATED_STEPS):
            samples += measure_step(repeat_calls(step, kernel), known)
            logging.info("%s: %d nodes so far", kernel, len(samples))
    return fit_instructions(samples)


def find_accompanied(steps: Iterable[LoweredStep]) -> set[str]:
    """Return the kernels that no node of the steps calls without others."""
    groups = [
        {call.kernel for call in find_computing_calls(node, calls)}
        for step in steps
        for node, calls in step.operations
    ]
    alone = set[str]().union(*(group for group in groups if len(group) == 1))
    return set[str]().union(*groups) - alone


def repeat_calls(step: LoweredStep, kernel: str) -> LoweredStep:
    """Return a step whose nodes execute each call of a kernel `REPEATS` times."""
    return step.with_operations(
        operation._replace(
            calls=tuple(
                call
                for one in operation.calls
                for call in (one,) * (REPEATS if one.kernel == kernel else 1)
            )
        )
        for operation in step.operations
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Count instructions, fit the table and write it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(poetmodel.lowered.__file__).parent / TABLE_FILE
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--new", action="store_true", help="only kernels that the table lacks")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    known = json.loads(default.read_text(encoding="utf-8")) if options.new else {}
    table = measure_kernels(known.keys())
    if options.new:
        table |= known
    else:
        measured_values = [
            [row[unit] for row in table.values() if unit in row] for unit in COMMON_ENTRIES
        ]
        table[OTHER_KERNELS] = {
            unit: float(f"{median(values):.{DIGITS}g}")
            for unit, values in zip(COMMON_ENTRIES, measured_values, strict=True)
        }
        table |= CHECKS
    text = json.dumps(table, indent=0, sort_keys=True)
    options.out.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
