"""Convolutions in pieces: with a fraction of the workspace, and the same bits.

oneDNN copies weights, images and gradients to its own layout, so that the gradients of one
convolution often determine the minimum budget of a step. Pieces of the channels or images need
copies of these only. Each number remains one sum; whether its order is the same is tested by
computing both. Sums over the batch are never divided, because they would round differently.

The backward pass of batch norm, which makes its result twice, is divided by channels too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import fx

from poetmodel.torch.graph.operators import kernel_of, set_kernel, stored_kernel
from poetmodel.torch.graph.tensors import heap_peak_bytes, tensors_in
from poetmodel.torch.step.scheduled import always_resident_bytes, keep_all_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from poetmodel.torch.step.trace import Trace

    OptionalTensor: TypeAlias = torch.Tensor | None

_FORWARD: Final = torch.ops.aten.convolution.default
_BACKWARD: Final = torch.ops.aten.convolution_backward.default
_NORM: Final = torch.ops.aten.native_batch_norm_backward.default

MAX_FRACTION: Final = 0.5
"""A convolution that needs a larger fraction of the budget is divided, so that other tensors fit in
RAM during the convolution."""
_COUNTS: Final = (2, 4, 8, 16)
_VECTOR: Final = 16
"""Pieces have a multiple of this number of channels, which fills the processor's vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOp:
    """A convolution or batch norm of a step that is computed in pieces."""

    operation: int
    divisions: tuple[Division | None, ...]
    """Division of the output, or of the gradients of input and of weight; None: not divided."""
    workspace_bytes: int
    """Workspace when computed in pieces [B]."""


def choose_divisions(trace: Trace, *, budget_bytes: int) -> list[SplitOp]:
    """Return the convolutions that need much of a budget, with divisions that preserve all bits.

    Parameters
    ----------
    trace : Trace
        A step with the workspaces of undivided convolutions.
    budget_bytes : int
        The step's budget [B].

    Returns
    -------
    list of SplitOp
        Found by computing each distinct convolution on random numbers, undivided and in pieces.
        Empty if everything fits.
    """
    if budget_bytes >= keep_all_bytes(trace):
        return []
    target_bytes = int(MAX_FRACTION * (budget_bytes - always_resident_bytes(trace)))
    sizes = {tensor.name: tensor.bytes for tensor in trace.graph.tensors}
    kernel_of_call: dict[str, tuple[Any, int] | None] = {}
    split_ops = []
    for operation in trace.step_graph.operations:
        node = trace.graph.nodes[operation.index]
        tensors_bytes = sum(sizes[name] for name in node.inputs) + node.output_bytes
        allowed_bytes = max(0, target_bytes - tensors_bytes)
        if (
            operation.node.target not in (_FORWARD, _BACKWARD, _NORM)
            or node.workspace_bytes <= allowed_bytes
        ):
            continue
        key = repr(
            (
                operation.node.target,
                fx.map_arg(operation.node.args, lambda source: source.meta["val"]),
            )
        )
        if key not in kernel_of_call:
            kernel_of_call[key] = _best_kernel(operation.node, allowed_bytes)
        measured_kernel = kernel_of_call[key]
        if measured_kernel is not None and measured_kernel[1] < node.workspace_bytes:
            kernel, size = measured_kernel
            split_ops.append(
                SplitOp(operation=operation.index, divisions=kernel.divisions, workspace_bytes=size)
            )
    return split_ops


def divide_convolutions(trace: Trace, chosen: Iterable[SplitOp]) -> Trace:
    """Set kernels that compute the chosen operations in pieces; return a trace with workspaces.

    Changes the nodes of the captured graph.
    """
    nodes = list(trace.graph.nodes)
    for divided in chosen:
        node = trace.step_graph.operations[divided.operation].node
        if node.target is _FORWARD:
            set_kernel(node, Forward(divided.divisions, _example(node)))
        else:
            kind = Backward if node.target is _BACKWARD else NormBackward
            set_kernel(node, kind(divided.divisions))
        nodes[divided.operation] = replace(
            nodes[divided.operation], workspace_bytes=divided.workspace_bytes
        )
    return replace(trace, graph=replace(trace.graph, nodes=tuple(nodes)))


def describe_split_kernels(trace: Trace) -> str:
    """Return the operations with chosen kernels, and the kernels, as text; a key of the step."""
    operations = trace.step_graph.operations
    chosen = ((operation, stored_kernel(operation.node)) for operation in operations)
    return "\n".join(
        f"{operation.name}: {kernel!r}" for operation, kernel in chosen if kernel is not None
    )


def _example(node: fx.Node) -> torch.Tensor:
    """Return a meta tensor with the layout of a node's output."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The divided dimension of a convolution, and the number of pieces."""

    kind: str
    """The divided dimension: images of the ``batch``, ``in`` or ``out`` channels, ``groups`` of
    both, or ``channels`` of a norm."""
    count: int
    groups: int = 1
    transposed: bool = False

    def ranges(self, total: int) -> Iterator[slice]:
        """Yield the range of each piece of `total` images, channels or groups."""
        size = -(-total // self.count)
        if self.kind in ("in", "out", "groups") and total % _VECTOR == 0:
            size = -(-size // _VECTOR) * _VECTOR
        for begin in range(0, total, size):
            yield slice(begin, min(total, begin + size))

    def pieces(
        self, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: OptionalTensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, OptionalTensor, int]]:
        """Yield per piece views of output, input, weight and bias, and the number of groups."""
        totals = {"batch": y.shape[0], "out": y.shape[1], "in": x.shape[1], "groups": self.groups}
        total = totals[self.kind]
        for span in self.ranges(total):
            if self.kind == "batch":
                yield y[span], x[span], w, b, self.groups
            elif self.kind == "in":
                weight = w[span] if self.transposed else w[:, span]
                yield y, x[:, span], weight, b, self.groups
            elif self.kind == "out":
                weight = w[:, span] if self.transposed else w[span]
                yield y[:, span], x, weight, None if b is None else b[span], self.groups
            else:
                output_range, input_range, weight_range = (
                    slice(span.start * size // total, span.stop * size // total)
                    for size in (y.shape[1], x.shape[1], w.shape[0])
                )
                bias = None if b is None else b[output_range]
                yield (
                    y[:, output_range],
                    x[:, input_range],
                    w[weight_range],
                    bias,
                    span.stop - span.start,
                )


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """A convolution in pieces."""

    divisions: tuple[Division | None, ...]
    example: torch.Tensor = field(repr=False)
    """The output as a meta tensor."""

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, b: OptionalTensor, *settings: Any
    ) -> torch.Tensor:
        """Return the result of ``aten.convolution``."""
        output = torch.empty_like(self.example, device=x.device)
        (division,) = self.divisions
        for y, *operands, groups in division.pieces(output, x, w, b) if division else ():
            y.copy_(_FORWARD(*operands, *settings[:-1], groups))
        return output


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of a convolution in pieces; the smaller one is computed first."""

    divisions: tuple[Division | None, ...]
    """Division of the input's gradient, and division of the gradients of weight and bias."""

    def __call__(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        *settings: Any,
    ) -> tuple[OptionalTensor, ...]:
        """Return the result of ``aten.convolution_backward``."""
        *other_settings, mask = settings
        b = dy.new_empty(bias_sizes) if mask[2] else None
        masks = [mask[0], False, False], [False, *mask[1:]]
        pairs = list(zip(self.divisions, masks, strict=True))
        if w.numel() < x.numel():
            pairs.reverse()
        gradients: list[OptionalTensor] = [None, None, None]
        for division, part_mask in pairs:
            if any(part_mask):
                values = _gradients(division, dy, (x, w, b), other_settings, part_mask)
                gradients = [
                    gradient if new_gradient is None else new_gradient
                    for gradient, new_gradient in zip(gradients, values, strict=True)
                ]
        return tuple(gradients)


def _gradients(
    division: Division | None,
    dy: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, OptionalTensor],
    settings: Sequence[Any],
    mask: Sequence[bool],
) -> Sequence[OptionalTensor]:
    """Return the gradients of input, weight and bias; None unless the mask selects them."""
    if division is None:
        gradients: Sequence[OptionalTensor] = _BACKWARD(
            dy, *operands[:2], [dy.shape[1]], *settings, mask
        )
        return gradients
    results: list[Any] = [
        torch.empty_like(value) if is_selected and value is not None else value
        for value, is_selected in zip(operands, mask, strict=True)
    ]
    targets = division.pieces(dy, *results)
    for (gradient, x, w, _, groups), (_, *views, _) in zip(
        division.pieces(dy, *operands), targets, strict=True
    ):
        values = _BACKWARD(gradient, x, w, [gradient.shape[1]], *settings[:-1], groups, mask)
        for view, value, is_selected in zip(views, values, mask, strict=True):
            if is_selected:
                view.copy_(value)
    return [
        value if is_selected else None for value, is_selected in zip(results, mask, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class NormBackward:
    """The gradients of a batch norm by channels, on copies of the inputs."""

    divisions: tuple[Division | None, ...]

    def __call__(
        self, dy: torch.Tensor, x: torch.Tensor, *settings: Any
    ) -> tuple[OptionalTensor, ...]:
        """Return the result of ``aten.native_batch_norm_backward``."""
        *vectors, train, eps, mask = settings
        scale = x.new_empty(x.shape[1]) if vectors[0] is None else vectors[0]
        gradients = [
            torch.empty_like(value) if is_selected else None
            for value, is_selected in zip((x, scale, scale), mask, strict=True)
        ]
        (division,) = self.divisions
        for span in division.ranges(x.shape[1]) if division else ():
            operands = [dy[:, span].contiguous(), x[:, span].contiguous()]
            operands += [None if vector is None else vector[span] for vector in vectors]
            values = _NORM(*operands, train, eps, mask)
            for gradient, value, index in zip(
                gradients, values, ((slice(None), span), span, span), strict=True
            ):
                if gradient is not None:
                    gradient[index] = value
        return tuple(gradients)


# -- trials ------------------------------------------------------------------------------------


def _best_kernel(node: fx.Node, allowed_bytes: int) -> tuple[Any, int] | None:
    """Return a divided kernel and its workspace; None if no division needs less [B].

    The kernel has the fewest pieces whose workspace is allowed, or the smallest workspace.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(source: fx.Node) -> torch.Tensor:
        value = source.meta["val"]
        steps = zip(value.shape, value.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        memory = torch.empty(span, dtype=value.dtype).normal_(generator=generator)
        return memory.as_strided(value.shape, value.stride())

    undivided = kernel_of(node)
    arguments = list(fx.map_arg(node.args, draw))
    with torch.no_grad():
        if node.target is _FORWARD:
            x, w, _, *settings = arguments
            example = _example(node)
            kind = "out" if w.numel() > x.numel() else "batch"
            kernels = [
                Forward((division,), example)
                for division in _divisions(kind, example, x, w, settings)
            ]
            return min_workspace_kernel(kernels, undivided, arguments, allowed_bytes)
        if node.target is _NORM:
            arguments[5:7] = _statistics(*arguments[1:7])
            norm_kernels = [
                NormBackward((Division(kind="channels", count=count),)) for count in _COUNTS
            ]
            return min_workspace_kernel(norm_kernels, undivided, arguments, allowed_bytes)
        *other_arguments, mask = arguments
        dy, x, w, _, *settings = other_arguments
        kind = "in" if w.numel() > x.numel() else "batch"
        input_division = weight_division = None
        if mask[0]:
            divisions = _divisions(kind, dy, x, w, settings)
            input_kernels = [Backward((division, None)) for division in divisions]
            operands = [*other_arguments, [True, False, False]]
            input_division = min_workspace_kernel(input_kernels, undivided, operands, allowed_bytes)
        kind = "in" if x.numel() > max(dy.numel(), w.numel()) else "out"
        if any(mask[1:]):
            divisions = _divisions(kind, dy, x, w, settings)
            weight_kernels = [Backward((None, division)) for division in divisions]
            operands = [*other_arguments, [False, *mask[1:]]]
            weight_division = min_workspace_kernel(
                weight_kernels, undivided, operands, allowed_bytes
            )
        combined = Backward(
            (
                input_division and input_division[0].divisions[0],
                weight_division and weight_division[0].divisions[1],
            )
        )
        return min_workspace_kernel([combined], undivided, arguments, allowed_bytes)


def _statistics(x: torch.Tensor, *vectors: OptionalTensor) -> list[OptionalTensor]:
    """Return a batch norm's saved statistics in its kernel's type instead of the input's."""
    running_vectors, saved_vectors = vectors[:3], vectors[3:]
    dtype = next((vector.dtype for vector in running_vectors if vector is not None), x.dtype)
    return [None if vector is None else vector.to(dtype) for vector in saved_vectors]


def _divisions(
    kind: str, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, settings: Sequence[Any]
) -> list[Division]:
    """Return possible divisions of a dimension with distinct numbers of pieces, ascending."""
    transposed, _, groups = settings[3:6]
    if groups > 1 and kind != "batch":
        kind = "groups"
    if transposed and kind == "groups":
        return []
    divisions: dict[int, Division] = {}
    for count in _COUNTS:
        division = Division(kind=kind, count=count, groups=groups, transposed=transposed)
        divisions.setdefault(sum(1 for _ in division.pieces(y, x, w, None)), division)
    return [division for pieces, division in divisions.items() if pieces > 1]


def min_workspace_kernel(
    kernels: Iterable[Any],
    undivided: Callable[..., Any],
    arguments: Sequence[Any],
    allowed_bytes: int,
) -> tuple[Any, int] | None:
    """Return a divided kernel with equal bits and less workspace, and its workspace [B].

    This is the first kernel whose workspace is at most `allowed_bytes`, otherwise the kernel with
    the smallest. None if the `undivided` kernel needs at most `allowed_bytes`, or no kernel with
    equal bits needs less.
    """
    expected, min_bytes = _measure_kernel(undivided, arguments)
    best_kernel = None
    for kernel in kernels:
        if min_bytes <= allowed_bytes:
            break
        outputs, size = _measure_kernel(kernel, arguments)
        is_equal = all(
            output.stride() == reference.stride() and torch.equal(output, reference)
            for output, reference in zip(outputs, expected, strict=True)
        )
        if is_equal and size < min_bytes:
            best_kernel, min_bytes = (kernel, size), size
    return best_kernel


def _measure_kernel(
    kernel: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Call a kernel; return its outputs and its workspace [B]."""
    outputs: list[torch.Tensor] = []
    peak_bytes = heap_peak_bytes(lambda: outputs.extend(tensors_in(kernel(*arguments))))
    return tuple(outputs), max(0, peak_bytes - sum(v.untyped_storage().nbytes() for v in outputs))
