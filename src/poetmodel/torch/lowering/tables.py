"""Inputs of bytes: what a model makes of each byte first, as one table that PyTorch fills in.

Whatever formula a model has for it, such as ``x.float() / 255`` or the normalization of channels,
256 results for each channel are all there can be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.lowered.tables import BYTES
from poetmodel.torch.capturing.joint_graph import InputKind, InputSpec, Joint
from poetmodel.torch.capturing.replay import call
from poetmodel.torch.lowering.operands import StridedView, lowers, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import fx

    from poetmodel.torch.lowering.operands import Lowering

aten: Final = torch.ops.aten
BYTE_TYPES: Final = (torch.uint8, torch.int8)
_COPIES: Final = (aten._to_copy.default, aten.clone.default)
"""Operators that copy each element, perhaps as another type."""
_IMAGE: Final = 3
"""Dimensions of one image, whose channels come first."""
_COLOURS: Final = 4
"""So many channels at most may come last."""
_FEW: Final = 16
"""So many channels always have tables; more where these are smaller than the real numbers."""


@torch.library.custom_op(  # type: ignore[untyped-decorator, unused-ignore]
    "poetmodel::lookup",
    mutates_args=(),
    schema="(Tensor x, Tensor rows, int dimension, int[] strides) -> Tensor",
)
def lookup(x: torch.Tensor, rows: torch.Tensor, dimension: int, strides: list[int]) -> torch.Tensor:
    """Return for each byte what a table has for it: its only row, or that of its channel."""
    out, index = torch.empty_strided(x.shape, strides, dtype=rows.dtype), x.long() % BYTES
    if len(rows) == 1:
        return out.copy_(rows[0][index])
    channel = torch.arange(len(rows)).view(-1, *[1] * (x.ndim - 1 - dimension))
    return out.copy_(rows[channel, index])


@lowers(torch.ops.poetmodel.lookup.default)
def _lookup(op: Lowering) -> None:
    x, rows, dimension, _ = op.args
    out, x, rows = op.output(), op.value(x), op.value(rows)
    steps = [0] * len(out.shape)
    if rows.shape[0] > 1:
        steps[dimension] = BYTES
    rows = StridedView(
        buffer=rows.buffer, offset=0, shape=out.shape, strides=tuple(steps), type=rows.type
    )
    op.call("pm_lookup", out, x, rows, table(op, out, x, rows))


def with_tables(joint: Joint) -> Joint:
    """Return a step in which tables say what the model makes of bytes, as far as they can.

    Each element must be computed from the byte at its place and from constants that are the same
    all over a channel. What depends on other things stays as it is, and so do the operations after
    it. The graph of `joint` is changed.
    """
    found = _Conversions(joint)
    if not found.ends:
        return joint
    graph, module = joint.graph_module.graph, joint.graph_module
    constants, made = [], {}
    for number, (end, dimension, rows) in enumerate(found.tables()):
        root = found.root_of[end]
        name = f"_bytes_as_reals_{number}"
        module.register_buffer(name, rows)
        with graph.inserting_before(end):
            constant = graph.get_attr(name)
            constant.meta["val"] = rows
            steps = list(end.meta["val"].stride())
            new = graph.call_function(lookup._opoverload, (root, constant, dimension, steps))
        new.meta = dict(end.meta)
        end.replace_all_uses_with(new, delete_user_cb=lambda user: user not in found.root_of)
        constants.append(
            InputSpec(
                kind=InputKind.CONSTANT_TENSOR,
                node=constant,
                target=name,
                name=f"{found.input_of[root].name} as reals{f' {number}' if number else ''}",
            )
        )
        made[end] = new
    graph.eliminate_dead_code()
    there = set(graph.nodes)
    return replace(
        joint,
        arguments=(*(a for a in joint.arguments if a.node in there), *constants),
        results=tuple(replace(r, node=made.get(r.node, r.node)) for r in joint.results),
    )


@dataclass(frozen=True, slots=True)
class _Constant:
    """A tensor that is the same in each step, without the dimensions that it repeats along."""

    value: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor) -> _Constant:
        for d, size in enumerate(value.shape):
            first = value.narrow(d, 0, 1) if size else value
            if size > 1 and bool((value == first).all()):
                value = first
        return cls(value)

    def varying(self, rank: int) -> set[int]:
        """Return the dimensions, of so many, along which it is not the same."""
        offset = rank - self.value.ndim
        return {offset + d for d, size in enumerate(self.value.shape) if size > 1}


class _Conversions:
    """The operations of a step that act on each byte of an input alone."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self.root_of: dict[fx.Node, fx.Node] = {}
        """For each operation the bytes that it converts: an input, or a view of one."""
        self.input_of: dict[fx.Node, InputSpec] = {}
        """For each input of bytes, and view of one, the input."""
        self._varying: dict[fx.Node, set[int]] = {}
        """For each operation the dimension that results depend on, if any."""
        changed = {r.target.node for r in joint.results if r.target is not None}
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        self._arguments = {
            a.node: a for a in joint.arguments if a.kind in kinds and a.node not in changed
        }
        self._constants: dict[fx.Node, torch.Tensor | None] = {}
        for argument in joint.arguments_of(InputKind.USER_INPUT):
            if getattr(joint.value(argument), "dtype", None) in BYTE_TYPES:
                self.input_of[argument.node] = argument
        if self.input_of:
            for node in joint.graph_module.graph.nodes:
                if node.op == "call_function":
                    self._look_at(node)
        self.ends = [node for node in self.root_of if self._is_end(node)]
        """The last operations of each chain, whose results others read."""

    def _look_at(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        first = node.args[0] if node.args else None
        if first in self.input_of and getattr(node.target, "is_view", False):
            if value.dtype in BYTE_TYPES:
                self.input_of[node] = self.input_of[first]
            return
        roots = {self.root_of.get(x, x) for x in node.all_input_nodes if self._is_byte(x)}
        if len(roots) != 1 or not _is_elementwise(node.target):
            return
        (root,) = roots
        varying: set[int] = set()
        for x in node.all_input_nodes:
            constant = None if self._is_byte(x) else self._constant(x)
            if not self._is_byte(x) and constant is None:
                return
            if constant is not None and constant.ndim > value.ndim:
                return
            varying |= (
                self._varying.get(x, set())
                if constant is None
                else _Constant.of(constant).varying(value.ndim)
            )
        same = value.shape == root.meta["val"].shape
        if same and len(varying) <= 1 and all(_is_channels(value.shape, d) for d in varying):
            self.root_of[node], self._varying[node] = root, varying

    def _is_byte(self, node: fx.Node) -> bool:
        return node in self.input_of or node in self.root_of

    def _is_end(self, node: fx.Node) -> bool:
        is_float = node.meta["val"].dtype is torch.float32
        return is_float and any(user not in self.root_of for user in node.users)

    def _constant(self, node: fx.Node) -> torch.Tensor | None:
        """Return the value of a node that is the same in each step; None for any other."""
        if node not in self._constants:
            self._constants[node] = self._found(node)
        return self._constants[node]

    def _found(self, node: fx.Node) -> torch.Tensor | None:
        if node in self._arguments:
            return self._joint.value(self._arguments[node]).detach()
        if node.op != "call_function" or _is_random(node.target):
            return None
        if any(self._constant(x) is None for x in node.all_input_nodes):
            return None
        value = self._called(node, self._constant)
        return value if isinstance(value, torch.Tensor) else None

    def _called(self, node: fx.Node, value_of: Any) -> Any:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        with torch.no_grad():
            return call(node, *arguments)

    def tables(self) -> Iterator[tuple[fx.Node, int, torch.Tensor]]:
        """Yield the end of each chain, the dimension of its channels, and its table.

        Bytes are in a dimension in front of all others, of which only that of channels is there.
        """
        for end in self.ends:
            root = self.root_of[end]
            shape, dtype = root.meta["val"].shape, root.meta["val"].dtype
            (dimension,) = self._varying[end] or {0}
            channels = shape[dimension] if self._varying[end] else 1
            sizes = [channels if d == dimension else 1 for d in range(len(shape))]
            bytes_ = torch.arange(BYTES).to(torch.uint8).view(dtype)
            values = {root: bytes_.view(-1, *[1] * len(sizes)).expand(-1, *sizes).contiguous()}
            for node in self.root_of:
                if self.root_of[node] is root and self._varying[node] <= self._varying[end]:
                    values[node] = self._converted(node, values)
            rows = values[end].reshape(BYTES, channels).t().contiguous()
            yield end, dimension, rows

    def _converted(self, node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
        """Return what an operation makes of values that have other sizes than in the graph."""
        if node.target in _COPIES:
            (x,) = node.all_input_nodes
            return values[x].to(node.meta["val"].dtype)

        def value_of(x: fx.Node) -> torch.Tensor | None:
            if x in values:
                return values[x]
            constant = self._constant(x)
            return None if constant is None else _Constant.of(constant).value

        value: torch.Tensor = self._called(node, value_of)
        return value


def _is_channels(shape: Sequence[int], dimension: int) -> bool:
    """Return whether a dimension is that of channels, so few that a table of each is worth it."""
    rank, channels = len(shape), shape[dimension]
    first = dimension == 1 or (dimension == 0 and rank == _IMAGE)
    last = dimension == rank - 1 and channels <= _COLOURS
    few = channels <= _FEW or channels * BYTES <= math.prod(shape)
    return (first or last) and few


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _is_elementwise(target: Any) -> bool:
    """Return whether an operator computes each element from those at its place."""
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return (pointwise or target in _COPIES) and not _is_random(target)
