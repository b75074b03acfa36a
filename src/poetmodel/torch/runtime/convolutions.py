"""Convolutions in pieces: with a fraction of the workspace, and the same bits.

oneDNN copies weights, images and gradients to its own layout, so that the gradients of one
convolution often determine the minimum budget of a step. A kernel that computes a piece of the
channels or images copies only the operands of that piece. Each element of a result remains one sum.
Whether its terms are added in the same order is tested by comparing results of the divided and the
undivided kernel. Sums over the batch are never divided, because they would round differently.

The backward pass of batch norm, which allocates its result twice, is divided by channels, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import fx

from poetmodel.torch.graph.operators import kernel_of, set_kernel, stored_kernel
from poetmodel.torch.graph.tensors import (
    call_key,
    fake_value,
    heap_peak_bytes,
    tensors_in,
    to_meta,
)
from poetmodel.torch.step.scheduled import always_resident_bytes, keep_all_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from poetmodel.torch.step.trace import Trace

    OptionalTensor: TypeAlias = torch.Tensor | None

_FORWARD: Final = torch.ops.aten.convolution.default
_BACKWARD: Final = torch.ops.aten.convolution_backward.default
_NORM_BACKWARD: Final = torch.ops.aten.native_batch_norm_backward.default

MAX_FRACTION: Final = 0.5
"""Fraction of the budget minus always resident bytes. An operation whose tensors and workspace need
more is divided if possible, so that other tensors fit in RAM during the operation."""
_PIECE_COUNTS: Final = (2, 4, 8, 16)
"""Numbers of pieces to try."""
_VECTOR_CHANNELS: Final = 16
"""If the number of channels or groups of a convolution is a multiple of this number, so is the size
of each piece, which then fills the processor's vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedOp:
    """A convolution or batch norm of a step that is computed in pieces."""

    operation: int
    """Index of the operation in the step's graph."""
    divisions: tuple[Division | None, ...]
    """For a convolution or a norm, one division: of the output, or of the norm's gradients. For a
    convolution's gradients two: of the input's, and of those of weight and bias; None for gradients
    that are not divided."""
    workspace_bytes: int
    """Workspace when computed in pieces [B]."""


def choose_divisions(trace: Trace, *, budget_bytes: int) -> list[DividedOp]:
    """Return the operations with a large workspace, with divisions that preserve all bits.

    They exceed `MAX_FRACTION` of the budget, and are tried on random numbers, once per call key.
    Each has the fewest pieces within that fraction, otherwise the smallest workspace.
    """
    if budget_bytes >= keep_all_bytes(trace):
        return []
    target_bytes = int(MAX_FRACTION * (budget_bytes - always_resident_bytes(trace)))
    sizes = {tensor.name: tensor.bytes for tensor in trace.graph.tensors}
    kernel_of_call: dict[Hashable, tuple[Any, int] | None] = {}
    divided_ops = []
    for operation in trace.step_graph.operations:
        node = trace.graph.nodes[operation.index]
        tensors_bytes = sum(sizes[name] for name in node.inputs) + node.output_bytes
        allowed_bytes = max(0, target_bytes - tensors_bytes)
        if (
            operation.node.target not in (_FORWARD, _BACKWARD, _NORM_BACKWARD)
            or node.workspace_bytes <= allowed_bytes
        ):
            continue
        arguments = fx.map_arg(operation.node.args, fake_value)
        key = (call_key(operation.node.target, arguments), allowed_bytes)
        if key not in kernel_of_call:
            kernel_of_call[key] = _find_divided_kernel(operation.node, allowed_bytes)
        measured_kernel = kernel_of_call[key]
        if measured_kernel is not None and measured_kernel[1] < node.workspace_bytes:
            kernel, workspace_bytes = measured_kernel
            divided_ops.append(
                DividedOp(
                    operation=operation.index,
                    divisions=kernel.divisions,
                    workspace_bytes=workspace_bytes,
                )
            )
    return divided_ops


def divide_convolutions(trace: Trace, divided_ops: Iterable[DividedOp]) -> Trace:
    """Return the trace with new workspaces; sets kernels in the graph that both traces share."""
    nodes = list(trace.graph.nodes)
    for divided_op in divided_ops:
        node = trace.step_graph.operations[divided_op.operation].node
        if node.target is _FORWARD:
            set_kernel(node, DividedConvolution(divided_op.divisions, _output_example(node)))
        else:
            kernel_class = (
                DividedConvolutionBackward if node.target is _BACKWARD else DividedNormBackward
            )
            set_kernel(node, kernel_class(divided_op.divisions))
        nodes[divided_op.operation] = replace(
            nodes[divided_op.operation], workspace_bytes=divided_op.workspace_bytes
        )
    return replace(trace, graph=replace(trace.graph, nodes=tuple(nodes)))


def describe_divided_kernels(trace: Trace) -> str:
    """Return a line for each operation with a stored kernel: its name and the kernel's `repr`."""
    operations = trace.step_graph.operations
    pairs = ((operation, stored_kernel(operation.node)) for operation in operations)
    return "\n".join(
        f"{operation.name}: {kernel!r}" for operation, kernel in pairs if kernel is not None
    )


def _output_example(node: fx.Node) -> torch.Tensor:
    """Return a meta tensor with the layout of a node's output."""
    return to_meta(node.meta["val"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The divided dimension of a convolution or batch norm, and the number of pieces."""

    dimension: str
    """The divided dimension: images of the ``batch``, ``in`` or ``out`` channels, ``groups`` of
    channels, or ``channels`` of a norm."""
    count: int
    """Maximum number of pieces."""
    groups: int = 1
    """Number of groups of the convolution."""
    transposed: bool = False
    """Whether the convolution is transposed."""

    def ranges(self, total: int) -> Iterator[slice]:
        """Yield a range per piece, of channels rounded up to `_VECTOR_CHANNELS` if divisible."""
        piece_size = -(-total // self.count)
        if self.dimension in ("in", "out", "groups") and total % _VECTOR_CHANNELS == 0:
            piece_size = -(-piece_size // _VECTOR_CHANNELS) * _VECTOR_CHANNELS
        for start in range(0, total, piece_size):
            yield slice(start, min(total, start + piece_size))

    def pieces(
        self, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: OptionalTensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, OptionalTensor, int]]:
        """Yield (output, input, weight, bias, number of groups) of each piece, with views."""
        totals = {"batch": y.shape[0], "out": y.shape[1], "in": x.shape[1], "groups": self.groups}
        total = totals[self.dimension]
        for piece in self.ranges(total):
            if self.dimension == "batch":
                yield y[piece], x[piece], w, b, self.groups
            elif self.dimension == "in":
                weight = w[piece] if self.transposed else w[:, piece]
                yield y, x[:, piece], weight, b, self.groups
            elif self.dimension == "out":
                weight = w[:, piece] if self.transposed else w[piece]
                yield y[:, piece], x, weight, None if b is None else b[piece], self.groups
            else:
                output_range, input_range, weight_range = (
                    slice(piece.start * size // total, piece.stop * size // total)
                    for size in (y.shape[1], x.shape[1], w.shape[0])
                )
                bias = None if b is None else b[output_range]
                yield (
                    y[:, output_range],
                    x[:, input_range],
                    w[weight_range],
                    bias,
                    piece.stop - piece.start,
                )


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DividedConvolution:
    """Kernel of a convolution in pieces."""

    divisions: tuple[Division | None, ...]
    """The only division, of the output by batch, output channels or groups; not None."""
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
class DividedConvolutionBackward:
    """Kernel of the gradients of a convolution in pieces; the smaller gradient comes last."""

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
        """Return the gradients of input, weight and bias, as ``aten.convolution_backward``."""
        *other_settings, mask = settings
        b = dy.new_empty(bias_sizes) if mask[2] else None
        gradient_masks = [mask[0], False, False], [False, *mask[1:]]
        pairs = list(zip(self.divisions, gradient_masks, strict=True))
        if w.numel() < x.numel():
            pairs.reverse()
        gradients: list[OptionalTensor] = [None, None, None]
        for division, gradient_mask in pairs:
            if any(gradient_mask):
                values = _compute_gradients(division, dy, (x, w, b), other_settings, gradient_mask)
                gradients = [
                    gradient if new_gradient is None else new_gradient
                    for gradient, new_gradient in zip(gradients, values, strict=True)
                ]
        return tuple(gradients)


def _compute_gradients(
    division: Division | None,
    dy: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, OptionalTensor],
    settings: Sequence[Any],
    mask: Sequence[bool],
) -> Sequence[OptionalTensor]:
    """Return gradients of input, weight and bias, undivided without `division`; None by `mask`."""
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
class DividedNormBackward:
    """Kernel of the gradients of a batch norm, in pieces of channels on copies of the inputs."""

    divisions: tuple[Division | None, ...]
    """The only division, of the channels; not None."""

    def __call__(
        self, dy: torch.Tensor, x: torch.Tensor, *settings: Any
    ) -> tuple[OptionalTensor, ...]:
        """Return the gradients of input, weight and bias of ``aten.native_batch_norm_backward``."""
        *vectors, train, eps, mask = settings
        scale = x.new_empty(x.shape[1]) if vectors[0] is None else vectors[0]
        gradients = [
            torch.empty_like(value) if is_selected else None
            for value, is_selected in zip((x, scale, scale), mask, strict=True)
        ]
        (division,) = self.divisions
        for channels in division.ranges(x.shape[1]) if division else ():
            operands = [dy[:, channels].contiguous(), x[:, channels].contiguous()]
            operands += [None if vector is None else vector[channels] for vector in vectors]
            values = _NORM_BACKWARD(*operands, train, eps, mask)
            for gradient, value, index in zip(
                gradients, values, ((slice(None), channels), channels, channels), strict=True
            ):
                if gradient is not None:
                    gradient[index] = value
        return tuple(gradients)


# -- trials ------------------------------------------------------------------------------------


def _find_divided_kernel(node: fx.Node, allowed_bytes: int) -> tuple[Any, int] | None:
    """Return (divided kernel of equal bits, its workspace [B]), found on random numbers.

    None if the undivided kernel's workspace is allowed, or no divided one needs less.
    """
    generator = torch.Generator().manual_seed(0)

    def draw_tensor(source: fx.Node) -> torch.Tensor:
        value = source.meta["val"]
        dims = zip(value.shape, value.stride(), strict=True)
        n_elements = 1 + sum((size - 1) * stride for size, stride in dims)
        memory = torch.empty(n_elements, dtype=value.dtype).normal_(generator=generator)
        return memory.as_strided(value.shape, value.stride())

    undivided_kernel = kernel_of(node)
    arguments = list(fx.map_arg(node.args, draw_tensor))
    with torch.no_grad():
        if node.target is _FORWARD:
            x, w, _, *settings = arguments
            example = _output_example(node)
            dimension = "out" if w.numel() > x.numel() else "batch"
            kernels = [
                DividedConvolution((division,), example)
                for division in _possible_divisions(dimension, example, x, w, settings)
            ]
            return find_min_workspace_kernel(kernels, undivided_kernel, arguments, allowed_bytes)
        if node.target is _NORM_BACKWARD:
            arguments[5:7] = _convert_statistics(*arguments[1:7])
            norm_kernels = [
                DividedNormBackward((Division(dimension="channels", count=count),))
                for count in _PIECE_COUNTS
            ]
            return find_min_workspace_kernel(
                norm_kernels, undivided_kernel, arguments, allowed_bytes
            )
        *other_arguments, mask = arguments
        dy, x, w, _, *settings = other_arguments
        dimension = "in" if w.numel() > x.numel() else "batch"
        input_division = weight_division = None
        if mask[0]:
            divisions = _possible_divisions(dimension, dy, x, w, settings)
            input_kernels = [DividedConvolutionBackward((division, None)) for division in divisions]
            operands = [*other_arguments, [True, False, False]]
            input_division = find_min_workspace_kernel(
                input_kernels, undivided_kernel, operands, allowed_bytes
            )
        dimension = "in" if x.numel() > max(dy.numel(), w.numel()) else "out"
        if any(mask[1:]):
            divisions = _possible_divisions(dimension, dy, x, w, settings)
            weight_kernels = [
                DividedConvolutionBackward((None, division)) for division in divisions
            ]
            operands = [*other_arguments, [False, *mask[1:]]]
            weight_division = find_min_workspace_kernel(
                weight_kernels, undivided_kernel, operands, allowed_bytes
            )
        combined_kernel = DividedConvolutionBackward(
            (
                input_division and input_division[0].divisions[0],
                weight_division and weight_division[0].divisions[1],
            )
        )
        return find_min_workspace_kernel(
            [combined_kernel], undivided_kernel, arguments, allowed_bytes
        )


def _convert_statistics(x: torch.Tensor, *vectors: OptionalTensor) -> list[OptionalTensor]:
    """Return saved mean and inverse deviation of a batch norm, the last two, in its type."""
    running_vectors, saved_vectors = vectors[:3], vectors[3:]
    dtype = next((vector.dtype for vector in running_vectors if vector is not None), x.dtype)
    return [None if vector is None else vector.to(dtype) for vector in saved_vectors]


def _possible_divisions(
    dimension: str, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, settings: Sequence[Any]
) -> list[Division]:
    """Return divisions into 2 or more pieces, fewest first; of groups if any, unless of a batch."""
    transposed, _, groups = settings[3:6]
    if groups > 1 and dimension != "batch":
        dimension = "groups"
    if transposed and dimension == "groups":
        return []
    divisions: dict[int, Division] = {}
    for count in _PIECE_COUNTS:
        division = Division(dimension=dimension, count=count, groups=groups, transposed=transposed)
        divisions.setdefault(sum(1 for _ in division.pieces(y, x, w, None)), division)
    return [division for n_pieces, division in divisions.items() if n_pieces > 1]


def find_min_workspace_kernel(
    kernels: Iterable[Any],
    undivided_kernel: Callable[..., Any],
    arguments: Sequence[Any],
    allowed_bytes: int,
) -> tuple[Any, int] | None:
    """Return (divided kernel with equal bits and strides, its smaller workspace [B]).

    The first within `allowed_bytes`, otherwise the smallest; None if the undivided one is within.
    """
    expected_outputs, min_bytes = _measure_kernel(undivided_kernel, arguments)
    best_kernel = None
    for kernel in kernels:
        if min_bytes <= allowed_bytes:
            break
        outputs, workspace_bytes = _measure_kernel(kernel, arguments)
        is_equal = all(
            output.stride() == reference.stride() and torch.equal(output, reference)
            for output, reference in zip(outputs, expected_outputs, strict=True)
        )
        if is_equal and workspace_bytes < min_bytes:
            best_kernel, min_bytes = (kernel, workspace_bytes), workspace_bytes
    return best_kernel


def _measure_kernel(
    kernel: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Call a kernel; return its outputs, and its workspace: its heap peak without outputs [B]."""
    outputs: list[torch.Tensor] = []
    peak_bytes = heap_peak_bytes(lambda: outputs.extend(tensors_in(kernel(*arguments))))
    return tuple(outputs), max(0, peak_bytes - sum(v.untyped_storage().nbytes() for v in outputs))
