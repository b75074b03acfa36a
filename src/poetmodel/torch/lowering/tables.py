"""Byte inputs: replace elementwise conversions of bytes by lookup tables that PyTorch computes.

For any elementwise formula, such as ``x.float() / 255`` or a normalization of channels, a table of
256 results per channel is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.lowered.tables import BYTE_VALUES
from poetmodel.torch.capturing.joint_graph import InputKind, InputSpec, Joint
from poetmodel.torch.capturing.replay import execute_kernel
from poetmodel.torch.graph.operators import is_random
from poetmodel.torch.lowering.operands import StridedView, lowers, shape_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import fx

    from poetmodel.torch.lowering.operands import Lowering

aten: Final = torch.ops.aten
_BYTE_TYPES: Final = (torch.uint8, torch.int8)
_COPIES: Final = (aten._to_copy.default, aten.clone.default)
"""Operators that copy elements, possibly to another type."""
_IMAGE_RANK: Final = 3
"""Dimensions of a single image without a batch, whose channels come first."""
_MAX_LAST_CHANNELS: Final = 4
"""Maximum size of the last dimension for which this dimension counts as channels."""
_MAX_TABLE_CHANNELS: Final = 16
"""Maximum number of channels with a table each. More channels have tables only if the tables have
no more elements than the converted input."""


@torch.library.custom_op(  # type: ignore[untyped-decorator, unused-ignore]
    "poetmodel::lookup",
    mutates_args=(),
    schema="(Tensor x, Tensor rows, int dimension, int[] strides) -> Tensor",
)
def lookup(x: torch.Tensor, rows: torch.Tensor, dimension: int, strides: list[int]) -> torch.Tensor:
    """Look up each byte in a table: in its only row, or in the row of the byte's channel.

    A row has 256 results; a negative int8 has the position of its value plus 256. `strides` are
    those of the new result.
    """
    out, index = torch.empty_strided(x.shape, strides, dtype=rows.dtype), x.long() % BYTE_VALUES
    if len(rows) == 1:
        return out.copy_(rows[0][index])
    channel = torch.arange(len(rows)).view(-1, *[1] * (x.ndim - 1 - dimension))
    return out.copy_(rows[channel, index])


@lowers(torch.ops.poetmodel.lookup.default)
def _lower_lookup(op: Lowering) -> None:
    """Lower a table lookup to one call; a table with a single row has only strides 0."""
    x, rows, dimension, _ = op.args
    out, x, rows = op.output(), op.value(x), op.value(rows)
    strides = [0] * len(out.shape)
    if rows.shape[0] > 1:
        strides[dimension] = BYTE_VALUES
    rows = StridedView(
        buffer=rows.buffer, offset=0, shape=out.shape, strides=tuple(strides), type=rows.type
    )
    op.call("pm_lookup", out, x, rows, shape_table(op, out, x, rows))


def replace_byte_conversions(joint: Joint) -> Joint:
    """Replace elementwise conversions of byte inputs by lookup tables; return the step.

    A conversion qualifies if its result is float32, and each element depends only on the byte at
    its position, and on constants that are equal within a channel. Changes the graph of `joint`.
    """
    conversions = _Conversions(joint)
    if not conversions.end_nodes:
        return joint
    graph, module = joint.graph_module.graph, joint.graph_module
    table_inputs, new_nodes = [], {}
    for index, (end_node, dimension, table) in enumerate(conversions.compute_tables()):
        source = conversions.source_of[end_node]
        name = f"_bytes_as_reals_{index}"
        module.register_buffer(name, table)
        with graph.inserting_before(end_node):
            table_node = graph.get_attr(name)
            table_node.meta["val"] = table
            strides = list(end_node.meta["val"].stride())
            lookup_node = graph.call_function(
                lookup._opoverload, (source, table_node, dimension, strides)
            )
        lookup_node.meta = dict(end_node.meta)
        end_node.replace_all_uses_with(
            lookup_node, delete_user_cb=lambda user: user not in conversions.source_of
        )
        table_inputs.append(
            InputSpec(
                kind=InputKind.CONSTANT_TENSOR,
                node=table_node,
                target=name,
                name=f"{conversions.input_of[source].name} as reals{f' {index}' if index else ''}",
            )
        )
        new_nodes[end_node] = lookup_node
    graph.eliminate_dead_code()
    remaining_nodes = set(graph.nodes)
    return replace(
        joint,
        arguments=(*(a for a in joint.arguments if a.node in remaining_nodes), *table_inputs),
        results=tuple(replace(r, node=new_nodes.get(r.node, r.node)) for r in joint.results),
    )


@dataclass(frozen=True, slots=True)
class _Constant:
    """A constant tensor, reduced to size 1 along dimensions where it repeats."""

    value: torch.Tensor

    @classmethod
    def reduce(cls, value: torch.Tensor) -> _Constant:
        """Return a tensor as a constant, reduced along dimensions where it repeats."""
        for dimension, size in enumerate(value.shape):
            first = value.narrow(dimension, 0, 1) if size else value
            if size > 1 and bool((value == first).all()):
                value = first
        return cls(value)

    def varying_dimensions(self, rank: int) -> set[int]:
        """Return the dimensions along which the constant varies, broadcast to `rank` dimensions."""
        offset = rank - self.value.ndim
        return {offset + d for d, size in enumerate(self.value.shape) if size > 1}


class _Conversions:
    """The operations of a step that convert each byte of an input elementwise."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self.source_of: dict[fx.Node, fx.Node] = {}
        """The byte input, or view of one, that each operation converts."""
        self.input_of: dict[fx.Node, InputSpec] = {}
        """The user input that each byte tensor is, or of which it is a view."""
        self._channel_dimensions: dict[fx.Node, set[int]] = {}
        """For each conversion, the set of its channel dimension; empty if it depends on none."""
        changed_nodes = {r.target.node for r in joint.results if r.target is not None}
        constant_kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        self._arguments = {
            a.node: a
            for a in joint.arguments
            if a.kind in constant_kinds and a.node not in changed_nodes
        }
        """Parameters, buffers and constants with equal values in each step: they have no gradient,
        and the step does not replace them."""
        self._constants: dict[fx.Node, torch.Tensor | None] = {}
        """Results of `_find_constant` by node."""
        for argument in joint.arguments_of(InputKind.USER_INPUT):
            if getattr(joint.value(argument), "dtype", None) in _BYTE_TYPES:
                self.input_of[argument.node] = argument
        if self.input_of:
            for node in joint.graph_module.graph.nodes:
                if node.op == "call_function":
                    self._add_conversion(node)
        self.end_nodes = [node for node in self.source_of if self._is_end(node)]
        """Conversions with a float32 result that nodes other than conversions read."""

    def _add_conversion(self, node: fx.Node) -> None:
        """Register a node that is a byte view of a byte input, or an elementwise conversion of one.

        A conversion has one source, in the shape of its result; further operands are constants,
        which vary along one channel dimension at most.
        """
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        first_argument = node.args[0] if node.args else None
        if first_argument in self.input_of and getattr(node.target, "is_view", False):
            if value.dtype in _BYTE_TYPES:
                self.input_of[node] = self.input_of[first_argument]
            return
        sources = {
            self.source_of.get(x, x) for x in node.all_input_nodes if self._is_byte_or_conversion(x)
        }
        if len(sources) != 1 or not _is_elementwise(node.target):
            return
        (source,) = sources
        dimensions: set[int] = set()
        for x in node.all_input_nodes:
            constant = None if self._is_byte_or_conversion(x) else self._find_constant(x)
            if not self._is_byte_or_conversion(x) and constant is None:
                return
            if constant is not None and constant.ndim > value.ndim:
                return
            dimensions |= (
                self._channel_dimensions.get(x, set())
                if constant is None
                else _Constant.reduce(constant).varying_dimensions(value.ndim)
            )
        has_input_shape = value.shape == source.meta["val"].shape
        if (
            has_input_shape
            and len(dimensions) <= 1
            and all(_is_channel_dimension(value.shape, d) for d in dimensions)
        ):
            self.source_of[node], self._channel_dimensions[node] = source, dimensions

    def _is_byte_or_conversion(self, node: fx.Node) -> bool:
        """Return whether a node is a byte input, a view of one, or a conversion of one."""
        return node in self.input_of or node in self.source_of

    def _is_end(self, node: fx.Node) -> bool:
        is_float = node.meta["val"].dtype is torch.float32
        return is_float and any(user not in self.source_of for user in node.users)

    def _find_constant(self, node: fx.Node) -> torch.Tensor | None:
        """Return the value of a node if the value is equal in each step, otherwise None; cached."""
        if node not in self._constants:
            self._constants[node] = self._compute_constant(node)
        return self._constants[node]

    def _compute_constant(self, node: fx.Node) -> torch.Tensor | None:
        """Return the value of a node if it is a tensor equal in each step, else None; uncached."""
        if node in self._arguments:
            return self._joint.value(self._arguments[node]).detach()
        if node.op != "call_function" or is_random(node.target):
            return None
        if any(self._find_constant(x) is None for x in node.all_input_nodes):
            return None
        value = self._execute(node, self._find_constant)
        return value if isinstance(value, torch.Tensor) else None

    def _execute(self, node: fx.Node, get_value: Any) -> Any:
        """Execute a node's kernel without gradients, on `get_value` of each argument node."""
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), get_value)
        with torch.no_grad():
            return execute_kernel(node, *arguments)

    def compute_tables(self) -> Iterator[tuple[fx.Node, int, torch.Tensor]]:
        """Yield (operation, channel dimension, table) of each conversion in `end_nodes`.

        A table has a row of results for the bytes 0 to 255 for each channel, or only one row; then
        the dimension is 0. An int8 below 0 has the position of its value plus 256.
        """
        for end_node in self.end_nodes:
            source = self.source_of[end_node]
            shape, dtype = source.meta["val"].shape, source.meta["val"].dtype
            (dimension,) = self._channel_dimensions[end_node] or {0}
            channels = shape[dimension] if self._channel_dimensions[end_node] else 1
            sizes = [channels if d == dimension else 1 for d in range(len(shape))]
            all_bytes = torch.arange(BYTE_VALUES).to(torch.uint8).view(dtype)
            values = {source: all_bytes.view(-1, *[1] * len(sizes)).expand(-1, *sizes).contiguous()}
            for node in self.source_of:
                if (
                    self.source_of[node] is source
                    and self._channel_dimensions[node] <= self._channel_dimensions[end_node]
                ):
                    values[node] = self._convert_bytes(node, values)
            table = values[end_node].reshape(BYTE_VALUES, channels).t().contiguous()
            yield end_node, dimension, table

    def _convert_bytes(self, node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
        """Return the results of a conversion for all 256 bytes, from constants and from `values`.

        `values` has the bytes, and results of earlier conversions, by node. Bytes are along the
        first dimension; only that of channels may have another size above 1.
        """
        if node.target in _COPIES:
            (x,) = node.all_input_nodes
            return values[x].to(node.meta["val"].dtype)

        def get_value(x: fx.Node) -> torch.Tensor | None:
            if x in values:
                return values[x]
            constant = self._find_constant(x)
            return None if constant is None else _Constant.reduce(constant).value

        value: torch.Tensor = self._execute(node, get_value)
        return value


def _is_channel_dimension(shape: Sequence[int], dimension: int) -> bool:
    """Return whether a dimension may be channels of images, few enough for a table each."""
    rank, channels = len(shape), shape[dimension]
    is_first = dimension == 1 or (dimension == 0 and rank == _IMAGE_RANK)
    is_last = dimension == rank - 1 and channels <= _MAX_LAST_CHANNELS
    is_small = channels <= _MAX_TABLE_CHANNELS or channels * BYTE_VALUES <= math.prod(shape)
    return (is_first or is_last) and is_small


def _is_elementwise(target: Any) -> bool:
    """Return whether elements of a result depend only on operands at their position, not random."""
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return (pointwise or target in _COPIES) and not is_random(target)
