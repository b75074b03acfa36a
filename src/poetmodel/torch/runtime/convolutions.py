"""Convolutions in parts: a fraction of the workspace, and the same bits.

oneDNN copies weights, images and gradients into an order of its own, so that the gradients of one
convolution often set the least budget of a step. Those of some channels, or of some images, need
copies of these only. Each number is still one sum; whether that runs in the same order is found by
computing it both ways. Sums over the batch are never divided: they would round otherwise.

The backward pass of batch norm, which makes its result twice, is divided by channels too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import fx

from poetmodel.torch.graph.operators import chosen_kernel, kernel_of, set_kernel
from poetmodel.torch.graph.tensors import heap_peak_bytes, tensors_in
from poetmodel.torch.step.scheduled import always_resident_bytes, keep_all_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from poetmodel.torch.step.trace import Trace

    Some: TypeAlias = torch.Tensor | None

_FORWARD: Final = torch.ops.aten.convolution.default
_BACKWARD: Final = torch.ops.aten.convolution_backward.default
_NORM: Final = torch.ops.aten.native_batch_norm_backward.default

SHARE: Final = 0.5
"""A convolution that needs more than this share of the budget is divided, so that there is room
beside it for what else must be in RAM meanwhile."""
_COUNTS: Final = (2, 4, 8, 16)
_VECTOR: Final = 16
"""Parts have a multiple of so many channels, which fill the vectors of the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOp:
    """A convolution of a step that is computed in parts."""

    operation: int
    divisions: tuple[Division | None, ...]
    """That of the output; or those of the gradients of input and weight."""
    workspace_bytes: int
    """Workspace then [B]."""


def divided_units(trace: Trace, *, budget_bytes: int) -> list[SplitOp]:
    """Return the convolutions that need much of a budget, divided without other bits.

    Parameters
    ----------
    trace : Trace
        A step, with the workspaces of whole convolutions.
    budget_bytes : int
        Its budget [B].

    Returns
    -------
    list of SplitOp
        Found by computing each form of convolution on random numbers, as a whole and in parts;
        none where everything has room.
    """
    if budget_bytes >= keep_all_bytes(trace):
        return []
    target_bytes = int(SHARE * (budget_bytes - always_resident_bytes(trace)))
    sizes = {tensor.name: tensor.bytes for tensor in trace.graph.tensors}
    known: dict[str, tuple[Any, int] | None] = {}
    chosen = []
    for operation in trace.parts.operations:
        node = trace.graph.nodes[operation.index]
        tensors_bytes = sum(sizes[name] for name in node.inputs) + node.output_bytes
        allowed_bytes = max(0, target_bytes - tensors_bytes)
        if (
            operation.node.target not in (_FORWARD, _BACKWARD, _NORM)
            or node.workspace_bytes <= allowed_bytes
        ):
            continue
        form = repr(
            (operation.node.target, fx.map_arg(operation.node.args, lambda n: n.meta["val"]))
        )
        if form not in known:
            known[form] = _chosen(operation.node, allowed_bytes)
        best = known[form]
        if best is not None and best[1] < node.workspace_bytes:
            kernel, size = best
            chosen.append(
                SplitOp(operation=operation.index, divisions=kernel.divisions, workspace_bytes=size)
            )
    return chosen


def in_parts(trace: Trace, chosen: Iterable[SplitOp]) -> Trace:
    """Return a step that computes some convolutions in parts, with the workspaces of these.

    Their operations are marked, so that whoever runs them does so in parts.
    """
    nodes = list(trace.graph.nodes)
    for divided in chosen:
        node = trace.parts.operations[divided.operation].node
        if node.target is _FORWARD:
            set_kernel(node, Forward(divided.divisions, _example(node)))
        else:
            kind = Backward if node.target is _BACKWARD else NormBackward
            set_kernel(node, kind(divided.divisions))
        nodes[divided.operation] = replace(
            nodes[divided.operation], workspace_bytes=divided.workspace_bytes
        )
    return replace(trace, graph=replace(trace.graph, nodes=tuple(nodes)))


def split_kernels(trace: Trace) -> str:
    """Return the operations of a step to compute in parts, and their parts."""
    chosen = ((operation, chosen_kernel(operation.node)) for operation in trace.parts.operations)
    return "\n".join(
        f"{operation.name}: {kernel!r}" for operation, kernel in chosen if kernel is not None
    )


def _example(node: fx.Node) -> torch.Tensor:
    """Return the output of an operation without its memory."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """SplitOp dimension of a convolution, and the number of parts."""

    kind: str
    """Images of the ``batch``, channels that go ``in`` or ``out``, or ``groups`` of both; the
    ``channels`` of a norm."""
    count: int
    groups: int = 1
    transposed: bool = False

    def ranges(self, total: int) -> Iterator[slice]:
        """Yield where the parts are of so many images, channels or groups."""
        size = -(-total // self.count)
        if self.kind in ("in", "out", "groups") and total % _VECTOR == 0:
            size = -(-size // _VECTOR) * _VECTOR
        for begin in range(0, total, size):
            yield slice(begin, min(total, begin + size))

    def parts(
        self, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: Some
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Some, int]]:
        """Yield views of output, input, weight and bias that belong together, and their groups."""
        ways = {"batch": y.shape[0], "out": y.shape[1], "in": x.shape[1], "groups": self.groups}
        total = ways[self.kind]
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
                outs, ins, rows = (
                    slice(span.start * size // total, span.stop * size // total)
                    for size in (y.shape[1], x.shape[1], w.shape[0])
                )
                bias = None if b is None else b[outs]
                yield y[:, outs], x[:, ins], w[rows], bias, span.stop - span.start


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """A convolution in parts."""

    divisions: tuple[Division | None, ...]
    example: torch.Tensor = field(repr=False)
    """An output without memory."""

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: Some, *how: Any) -> torch.Tensor:
        """Return the result of ``aten.convolution``."""
        output = torch.empty_like(self.example, device=x.device)
        (division,) = self.divisions
        for y, *part, groups in division.parts(output, x, w, b) if division else ():
            y.copy_(_FORWARD(*part, *how[:-1], groups))
        return output


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of a convolution in parts, the smaller one first."""

    divisions: tuple[Division | None, ...]
    """Parts for the gradient of the input, and for those of weight and bias."""

    def __call__(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        *how: Any,
    ) -> tuple[Some, ...]:
        """Return the result of ``aten.convolution_backward``."""
        *others, mask = how
        b = dy.new_empty(bias_sizes) if mask[2] else None
        masks = [mask[0], False, False], [False, *mask[1:]]
        ways = list(zip(self.divisions, masks, strict=True))
        if w.numel() < x.numel():
            ways.reverse()
        gradients: list[Some] = [None, None, None]
        for division, only in ways:
            if any(only):
                values = _gradients(division, dy, (x, w, b), others, only)
                gradients = [
                    old if new is None else new for old, new in zip(gradients, values, strict=True)
                ]
        return tuple(gradients)


def _gradients(
    division: Division | None,
    dy: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, Some],
    how: Sequence[Any],
    only: Sequence[bool],
) -> Sequence[Some]:
    """Return those gradients of input, weight and bias that are wanted."""
    if division is None:
        gradients: Sequence[Some] = _BACKWARD(dy, *operands[:2], [dy.shape[1]], *how, only)
        return gradients
    results: list[Any] = [
        torch.empty_like(value) if wanted and value is not None else value
        for value, wanted in zip(operands, only, strict=True)
    ]
    targets = division.parts(dy, *results)
    for (gradient, x, w, _, groups), (_, *views, _) in zip(
        division.parts(dy, *operands), targets, strict=True
    ):
        values = _BACKWARD(gradient, x, w, [gradient.shape[1]], *how[:-1], groups, only)
        for view, value, wanted in zip(views, values, only, strict=True):
            if wanted:
                view.copy_(value)
    return [value if wanted else None for value, wanted in zip(results, only, strict=True)]


@dataclass(frozen=True, slots=True)
class NormBackward:
    """The gradients of a batch norm, by channels, which are copied: their kernel is that of all."""

    divisions: tuple[Division | None, ...]

    def __call__(self, dy: torch.Tensor, x: torch.Tensor, *others: Any) -> tuple[Some, ...]:
        """Return the result of ``aten.native_batch_norm_backward``."""
        *vectors, train, eps, mask = others
        scale = x.new_empty(x.shape[1]) if vectors[0] is None else vectors[0]
        gradients = [
            torch.empty_like(value) if wanted else None
            for value, wanted in zip((x, scale, scale), mask, strict=True)
        ]
        (division,) = self.divisions
        for span in division.ranges(x.shape[1]) if division else ():
            parts = [dy[:, span].contiguous(), x[:, span].contiguous()]
            parts += [None if vector is None else vector[span] for vector in vectors]
            values = _NORM(*parts, train, eps, mask)
            for gradient, value, at in zip(
                gradients, values, ((slice(None), span), span, span), strict=True
            ):
                if gradient is not None:
                    gradient[at] = value
        return tuple(gradients)


# -- trials ------------------------------------------------------------------------------------


def _chosen(node: fx.Node, allowed_bytes: int) -> tuple[Any, int] | None:
    """Return a kernel with less workspace, and how much that is; None where there is none [B].

    It has the fewest parts whose workspace is allowed, or those that need the least.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(source: fx.Node) -> torch.Tensor:
        value = source.meta["val"]
        steps = zip(value.shape, value.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        base = torch.empty(span, dtype=value.dtype).normal_(generator=generator)
        return base.as_strided(value.shape, value.stride())

    whole = kernel_of(node)
    arguments = list(fx.map_arg(node.args, drawn))
    with torch.no_grad():
        if node.target is _FORWARD:
            x, w, _, *how = arguments
            example = _example(node)
            kind = "out" if w.numel() > x.numel() else "batch"
            kernels = [
                Forward((division,), example) for division in _divisions(kind, example, x, w, how)
            ]
            return least_workspace(kernels, whole, arguments, allowed_bytes)
        if node.target is _NORM:
            arguments[5:7] = _statistics(*arguments[1:7])
            norms = [NormBackward((Division(kind="channels", count=n),)) for n in _COUNTS]
            return least_workspace(norms, whole, arguments, allowed_bytes)
        *others, mask = arguments
        dy, x, w, _, *how = others
        kind = "in" if w.numel() > x.numel() else "batch"
        for_input = for_weight = None
        if mask[0]:
            ways = [Backward((division, None)) for division in _divisions(kind, dy, x, w, how)]
            only = [*others, [True, False, False]]
            for_input = least_workspace(ways, whole, only, allowed_bytes)
        kind = "in" if x.numel() > max(dy.numel(), w.numel()) else "out"
        if any(mask[1:]):
            ways = [Backward((None, division)) for division in _divisions(kind, dy, x, w, how)]
            only = [*others, [False, *mask[1:]]]
            for_weight = least_workspace(ways, whole, only, allowed_bytes)
        both = Backward(
            (for_input and for_input[0].divisions[0], for_weight and for_weight[0].divisions[1])
        )
        return least_workspace([both], whole, arguments, allowed_bytes)


def _statistics(x: torch.Tensor, *vectors: Some) -> list[Some]:
    """Return a batch norm's saved statistics in its kernel's type, not in the input's."""
    kept, saved = vectors[:3], vectors[3:]
    kind = next((vector.dtype for vector in kept if vector is not None), x.dtype)
    return [None if vector is None else vector.to(kind) for vector in saved]


def _divisions(
    kind: str, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, how: Sequence[Any]
) -> list[Division]:
    """Return ways to divide, fewer parts first."""
    transposed, _, groups = how[3:6]
    if groups > 1 and kind != "batch":
        kind = "groups"
    if transposed and kind == "groups":
        return []
    divisions: dict[int, Division] = {}
    for count in _COUNTS:
        way = Division(kind=kind, count=count, groups=groups, transposed=transposed)
        divisions.setdefault(sum(1 for _ in way.parts(y, x, w, None)), way)
    return [way for parts, way in divisions.items() if parts > 1]


def least_workspace(
    kernels: Iterable[Any], whole: Callable[..., Any], arguments: Sequence[Any], allowed_bytes: int
) -> tuple[Any, int] | None:
    """Return a kernel that gives the bits of the whole, and its workspace [B].

    The first one whose workspace is allowed, or that with the least; None where the whole has that.
    """
    expected, least_bytes = _measured(whole, arguments)
    best = None
    for kernel in kernels:
        if least_bytes <= allowed_bytes:
            break
        outputs, size = _measured(kernel, arguments)
        agrees = all(
            output.stride() == reference.stride() and torch.equal(output, reference)
            for output, reference in zip(outputs, expected, strict=True)
        )
        if agrees and size < least_bytes:
            best, least_bytes = (kernel, size), size
    return best


def _measured(
    kernel: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Return the outputs of a kernel, and its bytes beside them [B]."""
    outputs: list[torch.Tensor] = []
    peak_bytes = heap_peak_bytes(lambda: outputs.extend(tensors_in(kernel(*arguments))))
    return tuple(outputs), max(0, peak_bytes - sum(v.untyped_storage().nbytes() for v in outputs))
