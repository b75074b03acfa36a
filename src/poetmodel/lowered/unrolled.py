"""Compute gradients of shared weights as sums of one product per time step of a network.

PyTorch stacks tensors of all time steps of a recurrent layer, so that one product computes the
gradient of a weight: all pieces and the stack are in RAM at once. Here, the product of each piece
is added to the gradient as soon as the piece is computed. Only the order of summation changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.graph import Phase, Tensor
from poetmodel.lowered.calls import WORKSPACE, Buffer, Call, DataType, Ref
from poetmodel.lowered.catalogue import find_form, write_loops
from poetmodel.lowered.forms import ELEMENTWISE, MATRIX_PRODUCT, SUM
from poetmodel.lowered.fusing import fuse_updates, split_fused_updates
from poetmodel.lowered.loops import Loops, join_rows, make_shape_table, table_columns
from poetmodel.lowered.step import LoweredNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from poetmodel.graph import Node
    from poetmodel.lowered.loops import Numbers
    from poetmodel.lowered.step import LoweredStep


_ADD: Final = "pm_add"
"""The kernel that adds real numbers."""


def unroll_weight_gradients(step: LoweredStep) -> LoweredStep:
    """Return a step that sums gradients of weights by time step, without stacks of all time steps.

    A stack remains if its division saves no memory or is impossible, and for nodes that read it
    whole. Gradients of shared weights are summed in one memory. Returns `step` itself if unchanged.
    """
    rewritten = split_fused_updates(step)
    division = _Division(rewritten)
    if division.pieces:
        rewritten = _Rewriter(division).make_step()
    fused_step = _fuse_gradient_sums(rewritten)
    return (
        step
        if fused_step is step or (not division.pieces and fused_step is rewritten)
        else fuse_updates(fused_step)
    )


# -- pieces of tensors -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Division of a tensor of shape (outer, count, inner) into `count` pieces (outer, inner)."""

    outer: int
    count: int
    inner: int

    @property
    def elements(self) -> int:
        """Number of elements of one piece."""
        return self.outer * self.inner

    def find_only_piece(self, loops: Loops, index: int) -> tuple[int, Loops] | None:
        """Return (piece index, loops over it) if loops access one piece of tensor `index`."""
        indices = loops.element_indices(index)
        inner_rows = indices // self.inner
        piece = int(inner_rows.flat[0]) % self.count
        if (inner_rows % self.count != piece).any():
            return None
        indices_in_piece = inner_rows // self.count * self.inner + indices % self.inner
        piece_loops = loops.with_elements(index, loops.refs[index].buffer, indices_in_piece)
        return None if piece_loops is None else (piece, piece_loops)

    def split_loops(self, loops: Loops, index: int) -> Iterator[tuple[int, list[Loops]]]:
        """Yield (dimension, loops of each piece) for dimensions that may separate the pieces.

        Only sizes and strides are compared: callers check that the loops of each piece access that
        piece alone.
        """
        for d, (size, stride) in enumerate(zip(loops.sizes, loops.strides[index], strict=True)):
            group_size, remainder = divmod(self.inner, stride) if stride > 0 else (0, 1)
            group_size = min(group_size, size // self.count)
            if (
                group_size
                and not remainder
                and size in (group_size * self.count, group_size * self.count * self.outer)
            ):
                yield (
                    d,
                    [
                        loops.select_iterations(d, t, group_size=group_size, period=self.count)
                        for t in range(self.count)
                    ],
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceCall:
    """A call that accesses at most one piece of each divided tensor, and these pieces."""

    call: Call
    loops: Loops | None = None
    """Loops of the call; None if it accesses no pieces."""
    piece_of: Mapping[str, int] = field(default_factory=dict)
    """Index of the accessed piece, by name of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DividedCall:
    """A call of a node, undivided or as one call for each piece."""

    piece_calls: tuple[_PieceCall, ...]
    is_sum: bool = False
    """Whether the results of the calls for the pieces are summed up."""


def _read_loops(call: Call) -> Loops | None:
    """Return the loops of a call; None with a condition, or if its kernel restricts strides."""
    form = find_form(call)
    can_read = form is not None and form.is_general and call.condition is None
    return form.read(call) if form is not None and can_read else None


def _restrict_to_piece(loops: Loops, pieces: Mapping[str, _Pieces]) -> _PieceCall | None:
    """Return the call of loops that access at most one piece of each divided tensor, or None."""
    piece_of: dict[str, int] = {}
    for index, ref in enumerate(loops.refs):
        if ref.buffer in pieces:
            piece_and_loops = pieces[ref.buffer].find_only_piece(loops, index)
            if (
                piece_and_loops is None
                or piece_of.setdefault(ref.buffer, piece_and_loops[0]) != piece_and_loops[0]
            ):
                return None
            loops = piece_and_loops[1]
    call = write_loops(loops)
    return None if call is None else _PieceCall(call=call, loops=loops, piece_of=piece_of)


def _divide_call(call: Call, pieces: Mapping[str, _Pieces]) -> _DividedCall | None:
    """Return a call undivided, or as one call for each piece; None if neither is possible."""
    if not pieces.keys() & set(call.buffers):
        return _DividedCall(piece_calls=(_PieceCall(call=call),))
    loops = _read_loops(call)
    if loops is None:
        return None
    only_call = _restrict_to_piece(loops, pieces)
    if only_call is not None:
        return _DividedCall(piece_calls=(only_call,))
    for index, ref in enumerate(loops.refs):
        for d, piece_loops in (
            pieces[ref.buffer].split_loops(loops, index) if ref.buffer in pieces else ()
        ):
            piece_calls = [
                piece_call
                for loops_of_piece in piece_loops
                if (piece_call := _restrict_to_piece(loops_of_piece, pieces)) is not None
            ]
            if len(piece_calls) == len(piece_loops):
                return _DividedCall(
                    piece_calls=tuple(piece_calls), is_sum=not loops.strides_of("out")[d]
                )
    return None


class _Division:
    """The tensors of a step to divide into pieces, and the divided calls of nodes that use them."""

    def __init__(self, step: LoweredStep) -> None:
        self.step = step
        self.graph = step.graph
        self._returned_buffers = step.returned_buffers
        self.state_names = {self.graph.tensors[i].name for i in self.graph.state_tensors}
        self._accessing_nodes: dict[str, list[int]] = {}
        """Indices of the nodes that read or write each buffer, ascending, by name."""
        for k, calls in enumerate(step.calls):
            for name in dict.fromkeys(name for call in calls for name in call.buffers):
                self._accessing_nodes.setdefault(name, []).append(k)
        self.pieces: dict[str, _Pieces] = {}
        """The division of each tensor to divide."""
        self.undivided_stacks: set[str] = set()
        """Divided stacks of copies that some nodes also need undivided."""
        self.consumer_calls: dict[int, list[_DividedCall]] = {}
        """Calls that compute the undivided results of each node that uses a divided tensor.

        Includes nodes of stacks in `undivided_stacks`."""
        self.producer_calls: dict[int, list[_DividedCall]] = {}
        """Calls that compute the pieces of each divided result, by its node."""
        self._division_cache: dict[
            tuple[int, tuple[tuple[str, _Pieces], ...]], list[_DividedCall] | None
        ] = {}
        self._propose_stacks()
        while self.pieces and not self._divide_nodes():
            pass

    def is_copy(self, k: int) -> bool:
        """Return whether all calls of node `k` are copies; True without calls."""
        return all(call.is_copy for call in self.step.calls[k])

    # -- tensors to divide -----------------------------------------------------------------------

    def _is_divisible(self, name: str) -> bool:
        """Return whether a tensor of the graph may be divided.

        It must be real, used by a call, not returned, no state, and the only output of a
        recomputable node without workspace.
        """
        i = self.graph.tensor_index.get(name)
        if i is None or name in self._returned_buffers or name not in self._accessing_nodes:
            return False
        node = self.graph.nodes[self.graph.node_of[i]]
        is_plain = node.recomputable and not node.workspace_bytes and len(node.outputs) == 1
        return is_plain and not node.is_state and self.step.buffers[name].type is DataType.REAL

    def _propose_stacks(self) -> None:
        """Add stacks that save memory to `pieces`, then tensors that a first reader slices.

        A stack is the result of a node that copies equal pieces one after the other. The number of
        slices of a tensor must be that of the pieces of an added tensor.
        """
        for k in range(len(self.graph.nodes)):
            name, pieces = self._parse_stack(k)
            if pieces is not None and self._saves_memory(name, pieces):
                self._propose_tensor(name, pieces)
        counts = {pieces.count for pieces in self.pieces.values()}
        for tensor in self.graph.tensors if counts else ():
            if tensor.name not in self.pieces and self._is_divisible(tensor.name):
                for pieces in self._find_sliced_pieces(tensor.name, counts):
                    self._propose_tensor(tensor.name, pieces)

    def _parse_stack(self, k: int) -> tuple[str, _Pieces | None]:
        """Return (result, division) of the stack that node `k` makes; no division if none."""
        node, calls = self.graph.nodes[k], self.step.calls[k]
        if len(calls) <= 1 or len(node.outputs) != 1 or not self.is_copy(k):
            return "", None
        name = node.outputs[0].name
        inner, remainder = divmod(self.step.buffers[name].elements, len(calls))
        pieces = _Pieces(1, len(calls), inner)
        if remainder or not inner or not self._is_divisible(name):
            return "", None
        divided_copies = [_divide_call(call, {name: pieces}) for call in calls]
        piece_order = [
            copy.piece_calls[0].piece_of.get(name) if copy else None for copy in divided_copies
        ]
        return name, pieces if piece_order == list(range(len(calls))) else None

    def _saves_memory(self, name: str, pieces: _Pieces) -> bool:
        """Return whether all sums over the pieces of a stack together have fewer bytes than it."""
        sums = {
            call["out"]
            for k in self._accessing_nodes[name]
            for call in self.step.calls[k]
            if len(self.step.calls[k]) == 1 and self._sums_pieces(call, name, pieces)
        }
        sum_bytes = [self.step.buffers[ref.buffer].bytes for ref in sums if isinstance(ref, Ref)]
        return 0 < sum(sum_bytes) < self.step.buffers[name].bytes

    def _sums_pieces(self, call: Call, name: str, pieces: _Pieces) -> bool:
        """Return whether a call sums pieces of a tensor, or their products with another tensor."""
        divided_call = _divide_call(call, {name: pieces})
        inputs = {ref.buffer for parameter, ref in call.pointers.items() if parameter != "out"}
        return (
            divided_call is not None
            and divided_call.is_sum
            and find_form(call) in _SUMS
            and not (inputs - {name}) & self.state_names
        )

    def _propose_tensor(self, name: str, pieces: _Pieces) -> None:
        """Add tensor `name`, and transitively divisible tensors in the same loops, to `pieces`."""
        pieces_of_tensors = {name: pieces}
        while pieces_of_tensors:
            name, pieces = pieces_of_tensors.popitem()
            self.pieces[name] = pieces
            for k in self._accessing_nodes[name]:
                for call in self.step.calls[k]:
                    for other, other_pieces in _find_tensors_in_same_loop(
                        call, name, pieces, self.step.buffers
                    ):
                        if other not in self.pieces and self._is_divisible(other):
                            pieces_of_tensors.setdefault(other, other_pieces)

    def _find_sliced_pieces(self, name: str, counts: set[int]) -> list[_Pieces]:
        """Return, in a list, the division of a tensor by a slice that its first reader accesses.

        The number of pieces is one of `counts`; a slice has contiguous sequences of equal length
        (`inner`) and distance.
        """
        elements = self.step.buffers[name].elements
        readers = [k for k in self._accessing_nodes[name] if k != self._find_producer(name)]
        for k in readers[:1]:
            for call in self.step.calls[k]:
                loops = _read_loops(call) if name in call.buffers else None
                for index, ref in enumerate(loops.refs if loops else ()):
                    if loops and ref.buffer == name:
                        pairs = sorted(zip(loops.strides[index], loops.sizes, strict=True))
                        inner, distance = _find_contiguous_sequence(pairs, elements)
                        count = distance // inner
                        is_even = elements % distance == 0 and distance % inner == 0
                        if count in counts and is_even:
                            return [_Pieces(elements // distance, count, inner)]
        return []

    def _find_producer(self, name: str) -> int:
        return self.graph.node_of[self.graph.tensor_index[name]]

    # -- division of nodes -------------------------------------------------------------------------

    def _divide_nodes(self) -> bool:
        """Divide the calls of all nodes that use divided tensors; return whether that succeeded.

        Sets `producer_calls`, `consumer_calls` and `undivided_stacks` anew. A failure removes
        tensors from `pieces`, and the caller tries again.
        """
        self.undivided_stacks, self.consumer_calls, self.producer_calls = set(), {}, {}
        accessed_names: set[str] = set()
        for k in sorted(
            {k for name in self.pieces for k in self._accessing_nodes[name]}, reverse=True
        ):
            outputs = {tensor.name for tensor in self.graph.nodes[k].outputs}
            divided_outputs = outputs & self.pieces.keys()
            if divided_outputs and not self._divide_node(k, self.producer_calls, divided_outputs):
                return self._undivide(divided_outputs)
            if (
                not divided_outputs or divided_outputs & self.undivided_stacks
            ) and not self._divide_node(k, self.consumer_calls, set()):
                return self._undivide(set(self._list_divided_buffers(k)) - outputs)
            accessed_names |= self._find_accessed_tensors(k) - outputs
        return accessed_names >= self.pieces.keys() or self._undivide(
            self.pieces.keys() - accessed_names
        )

    def _divide_node(
        self, k: int, divided_calls: dict[int, list[_DividedCall]], outputs: set[str]
    ) -> bool:
        """Add the divided calls of node `k` to `divided_calls`; return whether that is possible.

        `outputs` is the result to compute in pieces, empty for a consumer. Stacks among the inputs
        that must stay undivided are added to `undivided_stacks`.
        """
        other_outputs = {tensor.name for tensor in self.graph.nodes[k].outputs} - outputs
        accessed_names = [
            name for name in self._list_divided_buffers(k) if name not in other_outputs
        ]
        for names in (
            accessed_names,
            [name for name in accessed_names if name in outputs or not self._is_stack(name)],
        ):
            piece_calls = self._divide_calls(k, names)
            if piece_calls is not None and (
                _writes_each_piece(piece_calls, self.pieces, outputs)
                or self._can_divide(k, piece_calls)
            ):
                divided_calls[k] = piece_calls
                self.undivided_stacks |= set(accessed_names) - set(names)
                return True
        return False

    def _find_accessed_tensors(self, k: int) -> set[str]:
        """Return the divided tensors whose pieces node `k` reads or writes."""
        divided_calls = (*self.producer_calls.get(k, ()), *self.consumer_calls.get(k, ()))
        return {
            name
            for divided_call in divided_calls
            for piece_call in divided_call.piece_calls
            for name in piece_call.piece_of
        }

    def find_readers(self, name: str) -> list[list[_PieceCall]]:
        """Return the calls that read each piece of a divided tensor, in step order."""
        readers: list[list[_PieceCall]] = [[] for _ in range(self.pieces[name].count)]
        producer_index = self._find_producer(name)
        for k in self._accessing_nodes[name]:
            calls_of_producer = self.producer_calls.get(k, []) if k != producer_index else []
            for call in (*calls_of_producer, *self.consumer_calls.get(k, [])):
                for piece_call in call.piece_calls:
                    if name in piece_call.piece_of:
                        readers[piece_call.piece_of[name]].append(piece_call)
        return readers

    def _undivide(self, names: Iterable[str]) -> bool:
        """Remove tensors from `pieces`; return False, as does `_divide_nodes` on failure."""
        for name in names:
            del self.pieces[name]
        return False

    def _list_divided_buffers(self, k: int) -> list[str]:
        buffer_names = {name for call in self.step.calls[k] for name in call.buffers}
        return [name for name in self.pieces if name in buffer_names]

    def _is_stack(self, name: str) -> bool:
        return self.is_copy(self._find_producer(name))

    def _divide_calls(self, k: int, names: Sequence[str]) -> list[_DividedCall] | None:
        """Return the calls of node `k` divided by the pieces of `names`; None if impossible."""
        key = (k, tuple((name, self.pieces[name]) for name in names))
        if key not in self._division_cache:
            calls = [_divide_call(call, dict(key[1])) for call in self.step.calls[k]]
            self._division_cache[key] = (
                None if None in calls else [divided_call for divided_call in calls if divided_call]
            )
        return self._division_cache[key]

    def _can_divide(self, k: int, piece_calls: list[_DividedCall]) -> bool:
        """Return whether a node with an undivided result can use `piece_calls`.

        Without a sum over pieces, divided calls need all pieces at once, so they may access only
        pieces of stacks: results of nodes that copy (`is_copy`).
        """
        divided_calls = [call for call in piece_calls if len(call.piece_calls) > 1]
        if not divided_calls:
            return True
        node = self.graph.nodes[k]
        if len(node.outputs) != 1 or node.workspace_bytes or not node.recomputable:
            return False
        if any(call.is_sum for call in divided_calls):
            return len(piece_calls) == 1 and _is_plain_sum(self.step.calls[k][0])
        return all(
            self._is_stack(name)
            for call in divided_calls
            for piece_call in call.piece_calls
            for name in piece_call.piece_of
        )


def _is_plain_sum(call: Call) -> bool:
    """Return whether a call is a sum or product that does not add to earlier values."""
    return find_form(call) in _SUMS and not call.named_arguments.get("accumulate")


_SUMS: Final = (MATRIX_PRODUCT, SUM)
"""Forms of kernels whose results for single pieces can be added up."""


def _find_contiguous_sequence(pairs: Iterable[tuple[int, int]], elements: int) -> tuple[int, int]:
    """Return (length of a contiguous sequence, distance to the next) in a buffer [elements].

    `pairs` are the (stride, size) of loops over the buffer, sorted by stride. The distance is
    `elements`, the buffer's size, if no stride is larger than the length.
    """
    length = 1
    for stride, size in pairs:
        if stride == length:
            length *= size
        elif stride > length and size > 1:
            return length, stride
    return length, elements


def _find_tensors_in_same_loop(
    call: Call, name: str, pieces: _Pieces, buffers: Mapping[str, Buffer]
) -> Iterator[tuple[str, _Pieces]]:
    """Yield (tensor, division) of other tensors that a call accesses in the loop over `pieces`.

    State is not excluded. From one iteration to the next, access to the other tensor advances by
    `inner` of its division.
    """
    loops = _read_loops(call)
    if (
        loops is None
        or name not in call.buffers
        or _restrict_to_piece(loops, {name: pieces}) is not None
    ):
        return
    for index, ref in enumerate(loops.refs):
        for _, piece_loops in pieces.split_loops(loops, index) if ref.buffer == name else ():
            if not all(
                _restrict_to_piece(loops_of_piece, {name: pieces})
                for loops_of_piece in (piece_loops[0], piece_loops[-1])
            ):
                continue
            for other_ref in loops.refs:
                distance = _measure_piece_distance(piece_loops, other_ref.buffer)
                if other_ref.buffer != name and distance > 0:
                    outer, remainder = divmod(
                        buffers[other_ref.buffer].elements, distance * pieces.count
                    )
                    if not remainder and outer:
                        yield other_ref.buffer, _Pieces(outer, pieces.count, distance)
            return


def _measure_piece_distance(piece_loops: Sequence[Loops], name: str) -> int:
    """Return the difference of the offsets in tensor `name` of the first two loops [elements]."""
    first, second = (
        next(ref.offset for ref in loops.refs if ref.buffer == name) for loops in piece_loops[:2]
    )
    return second - first


def _writes_each_piece(
    piece_calls: Sequence[_DividedCall], pieces: Mapping[str, _Pieces], outputs: set[str]
) -> bool:
    """Return whether `outputs` is one tensor, and the calls of a node write each piece of it."""
    if len(outputs) != 1:
        return False
    (name,) = outputs
    written_pieces = [
        [piece_call.piece_of.get(name) for piece_call in call.piece_calls] for call in piece_calls
    ]
    are_distinct = all(len(set(call)) == len(call) for call in written_pieces)
    return are_distinct and {t for call in written_pieces for t in call} == set(
        range(pieces[name].count)
    )


# -- the step in pieces ----------------------------------------------------------------------------


class _Rewriter:
    """Builds the step with divided tensors, and nodes in a new order."""

    def __init__(self, division: _Division) -> None:
        self.division = division
        self.old_step = division.step
        self.graph = division.graph
        self.buffers = {
            name: buffer
            for name, buffer in division.step.buffers.items()
            if name not in division.pieces or name in division.undivided_stacks
        }
        self.aliases: dict[str, tuple[str, np.ndarray]] = {}
        """(buffer, element indices) that replace a copied piece, by name of the piece."""
        self.early_nodes: list[LoweredNode] = []
        """Nodes to execute as soon as their inputs are computed, in the order of this list."""
        self.late_nodes: dict[str, LoweredNode] = {}
        """Nodes to execute right before the first reader of their result, by result.

        A node that reads state precedes the replacement of that state, too."""
        self.fixed_nodes: dict[int, LoweredNode] = {}
        """Nodes that retain the order of the old step, by their position in it."""
        self.ready_after: dict[str, int] = {}
        """Position in the old step after which each tensor can be computed; -1 if at once."""

    def make_step(self) -> LoweredStep:
        """Return the new step: new nodes replace divided ones and readers of pieces.

        Call this once: it removes nodes from `late_nodes`.
        """
        for k, node in enumerate(self.graph.nodes):
            if k in self.division.producer_calls:
                self._add_piece_nodes(k)
            self.ready_after.update((tensor.name, k) for tensor in node.outputs)
            if k in self.division.consumer_calls:
                self._add_consumer(k)
            elif k not in self.division.producer_calls:
                self.fixed_nodes[k] = self.old_step.operations[k]
        return self.old_step.with_operations(list(self._order_nodes()), buffers=self.buffers)

    def _add_piece_nodes(self, k: int) -> None:
        """Add a node and buffer for each piece of the result of node `k`, or an alias instead.

        The node joins `early_nodes` if it is of the backward pass and reads a piece of another
        tensor, otherwise `late_nodes`. A piece with an alias has no `ready_after`.
        """
        node, (result,) = self.graph.nodes[k], self.graph.nodes[k].outputs
        pieces = self.division.pieces[result.name]
        piece_calls = [
            piece_call
            for call in self.division.producer_calls[k]
            for piece_call in call.piece_calls
        ]
        buffer = Buffer(elements=pieces.elements, type=self.old_step.buffers[result.name].type)
        readers = self.division.find_readers(result.name)
        for t in range(pieces.count):
            calls_of_piece, name = (
                [piece_call for piece_call in piece_calls if piece_call.piece_of[result.name] == t],
                _make_piece_name(result.name, t),
            )
            alias = self._find_alias(calls_of_piece, pieces)
            if alias is not None and all(
                _resolve_alias(piece_call.loops, result.name, alias) for piece_call in readers[t]
            ):
                self.aliases[name] = alias
                continue
            calls, read_names = self._rename_pieces(calls_of_piece)
            read_names.pop(name)
            self.buffers[name] = buffer
            self.ready_after[name] = max(
                (self.ready_after.get(read_name, -1) for read_name in read_names), default=-1
            )
            new_node = LoweredNode(
                node=replace(
                    node,
                    name=_make_piece_name(node.name, t),
                    inputs=tuple(
                        read_name for read_name in read_names if read_name in self.ready_after
                    ),
                    outputs=(Tensor(name=name, bytes=buffer.bytes),),
                    flops=_divide_flops(node.flops, t, pieces.count),
                    bytes_moved=None,
                    in_place=self._find_in_place_pair(name, calls),
                ),
                calls=calls,
            )
            reads_pieces = any(len(piece_call.piece_of) > 1 for piece_call in calls_of_piece)
            if node.phase == Phase.BACKWARD and reads_pieces:
                self.early_nodes.append(new_node)
            else:
                self.late_nodes[name] = new_node

    def _find_alias(
        self, piece_calls: Sequence[_PieceCall], pieces: _Pieces
    ) -> tuple[str, np.ndarray] | None:
        """Return the (buffer, element indices) that can replace a copied piece, or None.

        State is unsuitable, because updates overwrite it. Inputs of the step and constants of any
        size are suitable: they stay in memory until the end of the step. Readers are not checked.
        """
        if len(piece_calls) != 1 or not piece_calls[0].call.is_copy:
            return None
        copy = self._resolve_loops(piece_calls[0])
        if copy is None:
            return None
        out, x = map(copy.index_of, ("out", "x"))
        target_indices, source_indices = (
            np.broadcast_to(copy.element_indices(k), copy.sizes) for k in (out, x)
        )
        name = copy.refs[x].buffer
        has_other_size = name in self.ready_after and self.buffers[name].elements != pieces.elements
        if (
            name in self.division.state_names
            or has_other_size
            or len(np.unique(target_indices)) != pieces.elements
        ):
            return None
        alias_indices = np.empty(pieces.elements, dtype=int)
        alias_indices[target_indices] = source_indices
        return name, alias_indices

    def _rename_pieces(
        self, piece_calls: Sequence[_PieceCall]
    ) -> tuple[tuple[Call, ...], dict[str, None]]:
        """Return the calls with new names of pieces, and the buffers accessed in order, as keys."""
        calls = []
        for piece_call in piece_calls:
            loops = self._resolve_loops(piece_call)
            call = piece_call.call if loops is None else write_loops(loops)
            if call is None:
                raise TypeError(piece_call)
            calls.append(call)
        return tuple(calls), dict.fromkeys(name for call in calls for name in call.buffers)

    def _resolve_loops(self, piece_call: _PieceCall) -> Loops | None:
        """Return the loops of a call on pieces, with the new (or aliased) buffer of each piece."""
        loops = piece_call.loops
        for name, t in piece_call.piece_of.items():
            alias = self.aliases.get(_make_piece_name(name, t))
            loops = (
                _rename_buffer(loops, name, _make_piece_name(name, t))
                if alias is None
                else _resolve_alias(loops, name, alias)
            )
        return loops

    def _find_in_place_pair(self, out: str, calls: Sequence[Call]) -> tuple[tuple[str, str], ...]:
        """Return ((output, input),) for the first input that the only call may overwrite, or ().

        The call must be elementwise; the input, a tensor of the graph but no state, must have equal
        size and type, and be accessed once and in the same order.
        """
        loops = (
            _read_loops(calls[0])
            if len(calls) == 1 and find_form(calls[0]) is ELEMENTWISE
            else None
        )
        if loops is None or loops.refs[loops.index_of("out")] != Ref(out):
            return ()
        for ref, strides in zip(loops.refs, loops.strides, strict=True):
            buffer_strides = [
                other_strides
                for other_ref, other_strides in zip(loops.refs, loops.strides, strict=True)
                if other_ref.buffer == ref.buffer
            ]
            if (
                strides == loops.strides_of("out")
                and ref.offset == 0
                and ref.buffer != out
                and buffer_strides == [strides]
                and ref.buffer in self.ready_after
                and ref.buffer not in self.division.state_names
                and self.buffers[ref.buffer] == self.buffers[out]
            ):
                return ((out, ref.buffer),)
        return ()

    def _add_consumer(self, k: int) -> None:
        """Replace node `k` by a node that reads pieces, or by a chain of nodes that sum pieces."""
        node, piece_calls = self.graph.nodes[k], self.division.consumer_calls[k]
        if any(len(call.piece_calls) > 1 and call.is_sum for call in piece_calls):
            self._add_sum_chain(k, piece_calls[0].piece_calls)
            return
        calls, accessed_names = self._rename_pieces(
            [piece_call for call in piece_calls for piece_call in call.piece_calls]
        )
        outputs = {tensor.name for tensor in node.outputs}
        in_place_pairs = tuple(pair for pair in node.in_place if pair[1] in accessed_names)
        if not in_place_pairs and len(outputs) == 1:
            in_place_pairs = self._find_in_place_pair(node.outputs[0].name, calls)
        accessed_inputs = tuple(
            name for name in accessed_names if name in self.ready_after and name not in outputs
        )
        earlier_inputs = tuple(
            name
            for name in node.inputs
            if name in outputs or (name in self.ready_after and name in accessed_names)
        )
        self.fixed_nodes[k] = LoweredNode(
            node=replace(
                node,
                inputs=tuple(dict.fromkeys((*earlier_inputs, *accessed_inputs))),
                bytes_moved=None,
                in_place=in_place_pairs,
            ),
            calls=calls,
        )

    def _add_sum_chain(self, k: int, piece_calls: Sequence[_PieceCall]) -> None:
        """Replace node `k`, a sum over pieces, by a chain of nodes; add them to `early_nodes`."""
        node, (result,) = self.graph.nodes[k], self.graph.nodes[k].outputs
        terms = []
        for index, piece_call in enumerate(piece_calls):
            (call,), accessed_names = self._rename_pieces([piece_call])
            accessed_names.pop(result.name)
            read_names = tuple(name for name in accessed_names if name in self.ready_after)
            ready_position = max((self.ready_after[name] for name in read_names), default=-1)
            terms.append((ready_position, index, call, read_names))
        previous_name, links = (
            "",
            [list(group) for _, group in groupby(sorted(terms), lambda term: term[0])],
        )
        for link in links:
            is_last = link is links[-1]
            name = result.name if is_last else _make_piece_name(result.name, link[0][1])
            calls: list[Call] = []
            if previous_name:
                count = self.old_step.buffers[result.name].elements
                calls.append(_copy(name, previous_name, count))
            for _, _, call, _ in link:
                calls += (
                    self._make_addition_calls(call, result.name, name)
                    if calls
                    else [call.with_arguments(out=Ref(name))]
                )
            read_names = tuple(
                dict.fromkeys(read_name for *_, names in link for read_name in names)
            )
            needs_workspace = any(WORKSPACE in call.buffers for call in calls)
            self.buffers[name] = self.old_step.buffers[result.name]
            self.early_nodes.append(
                LoweredNode(
                    node=replace(
                        node,
                        name=node.name if is_last else _make_piece_name(node.name, link[0][1]),
                        inputs=(*read_names, previous_name) if previous_name else read_names,
                        outputs=(replace(result, name=name),),
                        flops=sum(
                            _divide_flops(node.flops, t, len(piece_calls)) for _, t, *_ in link
                        ),
                        bytes_moved=None,
                        workspace_bytes=result.bytes if needs_workspace else 0,
                        in_place=((name, previous_name),) if previous_name else (),
                    ),
                    calls=tuple(calls),
                )
            )
            previous_name = name

    def _make_addition_calls(self, call: Call, result_name: str, out: str) -> list[Call]:
        """Return calls that add the result of `call`, a product or sum, to buffer `out`."""
        if find_form(call) is MATRIX_PRODUCT:
            return [call.with_arguments(out=Ref(out), accumulate=1)]
        loops = _read_loops(call)
        if loops is None:
            raise TypeError(call)
        count = self.old_step.buffers[result_name].elements
        rank = len(table_columns(call["outer"])[0])
        if prod(loops.sizes[rank:]) == 1 and call["divisor"] == 1.0:
            out_strides = loops.strides_of("out")
            table = make_shape_table((loops.sizes, out_strides, out_strides, loops.strides_of("x")))
            if table is not None:
                return [_add(out, loops.refs[loops.index_of("x")], table)]
        addition = _add(out, Ref(WORKSPACE), join_rows([(count, 1, 1, 1)]))
        return [call.with_arguments(out=Ref(WORKSPACE)), addition]

    # -- order -------------------------------------------------------------------------------------

    def _order_nodes(self) -> Iterator[LoweredNode]:
        """Yield fixed nodes in the order of the old step, with early and late nodes between them.

        An early node comes as soon as its inputs can be computed, a late node right before its
        first reader or a replacement of state that it reads. Removes the yielded nodes from
        `late_nodes`.
        """
        computed: set[str] = set()
        pending_nodes = list(self.early_nodes)

        def is_ready(new_node: LoweredNode) -> bool:
            return all(
                name in computed or (name in self.late_nodes and is_ready(self.late_nodes[name]))
                for name in new_node.node.inputs
            )

        def yield_with_inputs(new_node: LoweredNode) -> Iterator[LoweredNode]:
            for name in new_node.node.inputs:
                if name in self.late_nodes:
                    yield from yield_with_inputs(self.late_nodes.pop(name))
            computed.update(tensor.name for tensor in new_node.node.outputs)
            yield new_node

        for k in sorted(self.fixed_nodes):
            new_node = self.fixed_nodes[k]
            replaced_names = {tensor.replaces for tensor in new_node.node.outputs}
            for name in [
                result
                for result, late_node in self.late_nodes.items()
                if replaced_names & set(late_node.node.inputs)
            ]:
                if name in self.late_nodes:
                    yield from yield_with_inputs(self.late_nodes.pop(name))
            yield from yield_with_inputs(new_node)
            while (ready_node := next(filter(is_ready, pending_nodes), None)) is not None:
                pending_nodes.remove(ready_node)
                yield from yield_with_inputs(ready_node)


def _rename_buffer(loops: Loops | None, name: str, new: str) -> Loops | None:
    if loops is None:
        return None
    refs = (replace(ref, buffer=new) if ref.buffer == name else ref for ref in loops.refs)
    return replace(loops, refs=tuple(refs))


def _resolve_alias(loops: Loops | None, name: str, alias: tuple[str, np.ndarray]) -> Loops | None:
    """Return loops that access `alias`, (buffer, element indices), in place of piece `name`."""
    for index, ref in enumerate(loops.refs if loops else ()):
        if loops is not None and ref.buffer == name:
            loops = loops.with_elements(index, alias[0], alias[1][loops.element_indices(index)])
    return None if loops is None or write_loops(loops) is None else loops


def _copy(out: str, x: str, count: int) -> Call:
    """Return the copy of a tensor of real numbers."""
    shape = join_rows([(count, 1, 1)])
    return Call.by_name(DataType.REAL.copy_kernel, out=Ref(out), x=Ref(x), shape=shape)


def _add(out: str, term: Ref, shape: Numbers) -> Call:
    """Return the call that adds a term to a tensor."""
    return Call.by_name(_ADD, out=Ref(out), x=Ref(out), y=term, shape=shape, alpha=1.0)


def _make_piece_name(name: str, t: int) -> str:
    return f"{name}[{t}]"


def _divide_flops(total_flops: int, index: int, count: int) -> int:
    """Return the FLOP of one of `count` pieces; those of all pieces sum to `total_flops`."""
    return total_flops * (index + 1) // count - total_flops * index // count


# -- products that are added -----------------------------------------------------------------------


def _fuse_gradient_sums(step: LoweredStep) -> LoweredStep:
    """Fuse products with their addition to an earlier gradient, in the memory of that gradient.

    The gradients of a weight in two time steps are an example. The fused node has the position of
    the product, and the name and output of the addition. Returns `step` itself if unchanged.
    """
    graph = step.graph
    returned_names = step.returned_buffers
    operations: list[LoweredNode] = []
    position_of: dict[str, int] = {}
    removed_names: set[str] = set()
    for k, (node, calls) in enumerate(step.operations):
        earlier_sum = product = out = ""
        n = 0
        addition = _find_addition(calls)
        if addition is not None and position_of.keys() >= {*addition.terms}:
            earlier_sum, product = sorted(addition.terms, key=position_of.__getitem__)
            out, n = addition.out, addition.elements
        product_node, product_calls = operations[position_of[product]] if product else (node, calls)
        if (
            product not in returned_names
            and product
            and graph.users_of[graph.tensor_index[product]] == (k,)
            and _is_weight_gradient(product_calls, product, n)
            and _ends_with_gradient_product(*operations[position_of[earlier_sum]])
        ):
            removed_names.add(product)
            position_of[out] = position_of[product]
            copy_call = _copy(out, earlier_sum, n)
            adding_call = product_calls[0].with_arguments(out=Ref(out), accumulate=1)
            fused_node = replace(
                product_node,
                name=node.name,
                inputs=(*product_node.inputs, earlier_sum),
                outputs=node.outputs,
                flops=product_node.flops + node.flops,
                bytes_moved=None,
                in_place=((out, earlier_sum),),
            )
            operations[position_of[product]] = LoweredNode(fused_node, (copy_call, adding_call))
        else:
            position_of.update((tensor.name, len(operations)) for tensor in node.outputs)
            operations.append(LoweredNode(node, calls))
    if not removed_names:
        return step
    buffers = {name: buffer for name, buffer in step.buffers.items() if name not in removed_names}
    return step.with_operations(operations, buffers=buffers)


def _is_weight_gradient(calls: Sequence[Call], name: str, elements: int) -> bool:
    """Return whether the calls are one matrix product that computes the whole tensor `name`."""
    if len(calls) != 1 or not _is_gradient_product(calls[0]):
        return False
    (call,) = calls
    is_whole = call["out_row"] == call["n"] and call["m"] * call["n"] == elements
    return call["out"] == Ref(name) and is_whole and not call["accumulate"]


class _Addition(NamedTuple):
    """The sum of two dense tensors."""

    out: str
    terms: tuple[str, str]
    elements: int


def _find_addition(calls: Sequence[Call]) -> _Addition | None:
    """Return the sum of a node that only adds two dense tensors; None for others."""
    if len(calls) != 1 or calls[0].kernel != _ADD or calls[0]["alpha"] != 1.0:
        return None
    out, x, y = (calls[0][name] for name in ("out", "x", "y"))
    sizes, *strides = table_columns(calls[0]["shape"])
    is_dense = {*strides} == {(1,)} and x != y and not (out.offset or x.offset or y.offset)
    return _Addition(out.buffer, (x.buffer, y.buffer), sizes[0]) if is_dense else None


def _is_gradient_product(call: Call) -> bool:
    """Return whether a call is a product whose factors lie as in the gradient of a weight."""
    return find_form(call) is MATRIX_PRODUCT and call["a_row"] == 1 == call["b_column"]


def _ends_with_gradient_product(node: Node, calls: Sequence[Call]) -> bool:
    """Return whether a node is of the backward pass and its last call is a matrix product."""
    return bool(calls) and _is_gradient_product(calls[-1]) and node.phase == Phase.BACKWARD
