"""Gradients of shared weights as sums of one product per time step of an unrolled network.

PyTorch stacks tensors of all time steps of a recurrent layer, so that one product computes the
gradient of a weight: all pieces and the stack are in RAM at once. Here the product of each piece is
added to the gradient as soon as the piece is computed. Only the order of summation changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import WORKSPACE, Buffer, Call, DataType, Ref
from poetmodel.lowered.fusing import fuse_updates, split_fused_updates
from poetmodel.lowered.loops import Loops, call_refs, is_by_element, loops_of, shape_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from poetmodel.lowered.step import LoweredStep


def unroll_weight_gradients(step: LoweredStep) -> LoweredStep:
    """Return a step that sums gradients of weights by time step, without stacks of all time steps.

    Operators on all time steps at once (gates from inputs, gradients of inputs) are divided into
    one per time step if time steps read their results. A product that is added to the gradient of a
    shared weight is summed in the memory of that gradient. Returns `step` itself if unchanged.
    """
    rewritten = split_fused_updates(step)
    division = _Division(rewritten)
    if division.pieces:
        rewritten = _Rewriter(division).step()
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

    def only_piece(self, loops: Loops, number: int) -> tuple[int, Loops] | None:
        """Return (piece, loops over it) if loops access one piece of an operand, otherwise None."""
        elements = loops.elements(number)
        rows = elements // self.inner
        piece = int(rows.flat[0]) % self.count
        if (rows % self.count != piece).any():
            return None
        inside = rows // self.count * self.inner + elements % self.inner
        piece_loops = loops.with_elements(number, loops.refs[number].buffer, inside)
        return None if piece_loops is None else (piece, piece_loops)

    def split_loops(self, loops: Loops, number: int) -> Iterator[tuple[int, list[Loops]]]:
        """Yield (dimension, loops per piece) for each dimension that separates its pieces."""
        for d, (size, step) in enumerate(zip(loops.sizes, loops.steps[number], strict=True)):
            rows, remainder = divmod(self.inner, step) if step > 0 else (0, 1)
            rows = min(rows, size // self.count)
            if (
                rows
                and not remainder
                and size in (rows * self.count, rows * self.count * self.outer)
            ):
                yield (
                    d,
                    [loops.subset(d, t, rows=rows, count=self.count) for t in range(self.count)],
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceCall:
    """A call, or one of the calls into which it is divided, with the pieces that it accesses."""

    call: Call
    loops: Loops | None = None
    """Loops of the call; None if it accesses no pieces."""
    piece_of: Mapping[str, int] = field(default_factory=dict)
    """Number of the accessed piece, by tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DividedCall:
    """A call in terms of pieces: one call, or one for each piece."""

    piece_calls: tuple[_PieceCall, ...]
    is_sum: bool = False
    """Whether the results of the calls are summed up."""


def _restrict_to_piece(loops: Loops, pieces: Mapping[str, _Pieces]) -> _PieceCall | None:
    """Return the call of loops that access one piece of each divided tensor; otherwise None."""
    piece_of: dict[str, int] = {}
    for number, ref in enumerate(loops.refs):
        if ref.buffer in pieces:
            piece_and_loops = pieces[ref.buffer].only_piece(loops, number)
            if (
                piece_and_loops is None
                or piece_of.setdefault(ref.buffer, piece_and_loops[0]) != piece_and_loops[0]
            ):
                return None
            loops = piece_and_loops[1]
    call = loops.as_call()
    return None if call is None else _PieceCall(call=call, loops=loops, piece_of=piece_of)


def _divide_call(call: Call, pieces: Mapping[str, _Pieces]) -> _DividedCall | None:
    """Divide a call by the pieces of its tensors; None if it cannot be divided."""
    if not pieces.keys() & set(call.buffers):
        return _DividedCall(piece_calls=(_PieceCall(call=call),))
    loops = loops_of(call)
    if loops is None:
        return None
    whole = _restrict_to_piece(loops, pieces)
    if whole is not None:
        return _DividedCall(piece_calls=(whole,))
    for number, ref in enumerate(loops.refs):
        for d, piece_loops in (
            pieces[ref.buffer].split_loops(loops, number) if ref.buffer in pieces else ()
        ):
            divided = [
                part
                for piece in piece_loops
                if (part := _restrict_to_piece(piece, pieces)) is not None
            ]
            if len(divided) == len(piece_loops):
                return _DividedCall(piece_calls=tuple(divided), is_sum=loops.steps[0][d] == 0)
    return None


class _Division:
    """The tensors of a step to divide into pieces, and the divided calls of nodes that use them."""

    def __init__(self, step: LoweredStep) -> None:
        """Find the tensors to divide, and divide the calls of the nodes that use them."""
        self.step = step
        self.graph = step.graph
        self._handed_out = step.returned_buffers
        self.state = {self.graph.tensors[i].name for i in self.graph.state_tensors}
        self._users: dict[str, list[int]] = {}
        for k, calls in enumerate(step.calls):
            for name in dict.fromkeys(name for call in calls for name in call.buffers):
                self._users.setdefault(name, []).append(k)
        self.pieces: dict[str, _Pieces] = {}
        self.whole: set[str] = set()
        """Divided tensors that some nodes also need undivided: stacks of copies."""
        self.consumers: dict[int, list[_DividedCall]] = {}
        """Divided calls of each node that accesses a divided tensor and has an undivided result."""
        self.producers: dict[int, list[_DividedCall]] = {}
        """Divided calls of each node with a divided result."""
        self._divided: dict[
            tuple[int, tuple[tuple[str, _Pieces], ...]], list[_DividedCall] | None
        ] = {}
        self._propose_stacks()
        while self.pieces and not self._divide_nodes():
            pass

    def is_copy(self, k: int) -> bool:
        """Return whether a node only copies, so that the pieces of its result exist before it."""
        return all(call.kernel == "pm_copy" for call in self.step.calls[k])

    # -- which tensors ---------------------------------------------------------------------------

    def _is_divisible(self, name: str) -> bool:
        i = self.graph.tensor_index.get(name)
        if i is None or name in self._handed_out or name not in self._users:
            return False
        node = self.graph.nodes[self.graph.node_of[i]]
        plain = node.recomputable and not node.workspace_bytes and len(node.outputs) == 1
        return plain and not node.is_state and self.step.buffers[name].type is DataType.REAL

    def _propose_stacks(self) -> None:
        """Propose to divide stacks for weight gradients, and tensors in the same loops."""
        for k in range(len(self.graph.nodes)):
            name, pieces = self._parse_stack(k)
            if pieces is not None and self._saves_memory(name, pieces):
                self._propose_tensor(name, pieces)
        counts = {pieces.count for pieces in self.pieces.values()}
        for tensor in self.graph.tensors if counts else ():
            if tensor.name not in self.pieces and self._is_divisible(tensor.name):
                for pieces in self._sliced_pieces(tensor.name, counts):
                    self._propose_tensor(tensor.name, pieces)

    def _parse_stack(self, k: int) -> tuple[str, _Pieces | None]:
        """Return (result, pieces) of a node that stacks equal pieces, otherwise ("", None)."""
        node, calls = self.graph.nodes[k], self.step.calls[k]
        if len(calls) <= 1 or len(node.outputs) != 1 or not self.is_copy(k):
            return "", None
        name = node.outputs[0].name
        inner, remainder = divmod(self.step.buffers[name].elements, len(calls))
        pieces = _Pieces(1, len(calls), inner)
        if remainder or not inner or not self._is_divisible(name):
            return "", None
        copies = [_divide_call(call, {name: pieces}) for call in calls]
        order = [copy.piece_calls[0].piece_of.get(name) if copy else None for copy in copies]
        return name, pieces if order == list(range(len(calls))) else None

    def _saves_memory(self, name: str, pieces: _Pieces) -> bool:
        """Return whether a stack uses more memory than the sums over its pieces."""
        sums = {
            call.arguments[0]
            for k in self._users[name]
            for call in self.step.calls[k]
            if len(self.step.calls[k]) == 1 and self._sums_pieces(call, name, pieces)
        }
        results = [self.step.buffers[ref.buffer].bytes for ref in sums if isinstance(ref, Ref)]
        return 0 < sum(results) < self.step.buffers[name].bytes

    def _sums_pieces(self, call: Call, name: str, pieces: _Pieces) -> bool:
        """Return whether a call sums pieces, or products of pieces with another activation."""
        piece_calls = _divide_call(call, {name: pieces})
        other_inputs = {ref.buffer for ref in call_refs(call)[1:]} - {name}
        return (
            piece_calls is not None
            and piece_calls.is_sum
            and call.kernel in _SUMS
            and not other_inputs & self.state
        )

    def _propose_tensor(self, name: str, pieces: _Pieces) -> None:
        """Propose to divide a tensor and, transitively, tensors in the same loops."""
        pending = {name: pieces}
        while pending:
            name, pieces = pending.popitem()
            self.pieces[name] = pieces
            for k in self._users[name]:
                for call in self.step.calls[k]:
                    for other, other_pieces in _tensors_in_same_loop(
                        call, name, pieces, self.step.buffers
                    ):
                        if other not in self.pieces and self._is_divisible(other):
                            pending.setdefault(other, other_pieces)

    def _sliced_pieces(self, name: str, counts: set[int]) -> list[_Pieces]:
        """Return the pieces of a tensor, of which the first reader accesses one; [] if none."""
        elements = self.step.buffers[name].elements
        readers = [k for k in self._users[name] if k != self._maker(name)]
        for k in readers[:1]:
            for call in self.step.calls[k]:
                loops = loops_of(call) if name in call.buffers else None
                for number, ref in enumerate(loops.refs if loops else ()):
                    if loops and ref.buffer == name:
                        pairs = sorted(zip(loops.steps[number], loops.sizes, strict=True))
                        inner, distance = _contiguous_sequence(pairs, elements)
                        count = distance // inner
                        if count in counts and elements % distance == 0:
                            return [_Pieces(elements // distance, count, inner)]
        return []

    def _maker(self, name: str) -> int:
        return self.graph.node_of[self.graph.tensor_index[name]]

    # -- division of nodes -------------------------------------------------------------------------

    def _divide_nodes(self) -> bool:
        """Divide the calls of all nodes around divided tensors; return whether that succeeded.

        Otherwise some tensors are removed from `pieces`, and the caller tries again.
        """
        self.whole, self.consumers, self.producers = set(), {}, {}
        accessed_names: set[str] = set()
        for k in sorted({k for name in self.pieces for k in self._users[name]}, reverse=True):
            outputs = {tensor.name for tensor in self.graph.nodes[k].outputs}
            divided_outputs = outputs & self.pieces.keys()
            if divided_outputs and not self._divide_node(k, self.producers, divided_outputs):
                return self._undivide(divided_outputs)
            if (not divided_outputs or divided_outputs & self.whole) and not self._divide_node(
                k, self.consumers, set()
            ):
                return self._undivide(set(self._divided_buffers(k)) - outputs)
            accessed_names |= self._accessed_tensors(k) - outputs
        return accessed_names >= self.pieces.keys() or self._undivide(
            self.pieces.keys() - accessed_names
        )

    def _divide_node(
        self, k: int, divided_calls: dict[int, list[_DividedCall]], outputs: set[str]
    ) -> bool:
        """Add the divided calls of node `k` to `divided_calls`; return whether they can be divided.

        `outputs` are its divided results. Stacks of copies may remain undivided inputs; they are
        then added to `whole`.
        """
        other_outputs = {tensor.name for tensor in self.graph.nodes[k].outputs} - outputs
        accessed_names = [name for name in self._divided_buffers(k) if name not in other_outputs]
        for names in (
            accessed_names,
            [n for n in accessed_names if n in outputs or not self._is_stack(n)],
        ):
            piece_calls = self._divide_calls(k, names)
            if piece_calls is not None and (
                _covers(piece_calls, self.pieces, outputs) or self._can_divide(k, piece_calls)
            ):
                divided_calls[k] = piece_calls
                self.whole |= set(accessed_names) - set(names)
                return True
        return False

    def _accessed_tensors(self, k: int) -> set[str]:
        """Return the divided tensors of which node `k` accesses pieces."""
        piece_calls = (*self.producers.get(k, ()), *self.consumers.get(k, ()))
        return {name for call in piece_calls for part in call.piece_calls for name in part.piece_of}

    def readers(self, name: str) -> list[list[_PieceCall]]:
        """Return the divided calls that read a tensor, by piece."""
        readers: list[list[_PieceCall]] = [[] for _ in range(self.pieces[name].count)]
        maker = self._maker(name)
        for k in self._users[name]:
            producer_calls = self.producers.get(k, []) if k != maker else []
            for call in (*producer_calls, *self.consumers.get(k, [])):
                for piece_call in call.piece_calls:
                    if name in piece_call.piece_of:
                        readers[piece_call.piece_of[name]].append(piece_call)
        return readers

    def _undivide(self, names: Iterable[str]) -> bool:
        """Remove tensors from the divided ones, and return False."""
        for name in names:
            del self.pieces[name]
        return False

    def _divided_buffers(self, k: int) -> list[str]:
        buffer_names = {name for call in self.step.calls[k] for name in call.buffers}
        return [name for name in self.pieces if name in buffer_names]

    def _is_stack(self, name: str) -> bool:
        return self.is_copy(self._maker(name))

    def _divide_calls(self, k: int, names: Sequence[str]) -> list[_DividedCall] | None:
        """Return the calls of a node divided by the pieces of `names`; None if impossible."""
        key = (k, tuple((name, self.pieces[name]) for name in names))
        if key not in self._divided:
            calls = [_divide_call(call, dict(key[1])) for call in self.step.calls[k]]
            self._divided[key] = (
                None if None in calls else [call_parts for call_parts in calls if call_parts]
            )
        return self._divided[key]

    def _can_divide(self, k: int, piece_calls: list[_DividedCall]) -> bool:
        """Return whether a node with an undivided result can use divided calls.

        Each call must access one piece of each tensor, or sum pieces. A call that places pieces
        side by side needs all at once, which is permitted only for copies.
        """
        division = [call for call in piece_calls if len(call.piece_calls) > 1]
        if not division:
            return True
        node = self.graph.nodes[k]
        if len(node.outputs) != 1 or node.workspace_bytes or not node.recomputable:
            return False
        if any(call.is_sum for call in division):
            return len(piece_calls) == 1 and _is_plain_sum(self.step.calls[k][0])
        return all(
            self._is_stack(n)
            for call in division
            for part in call.piece_calls
            for n in part.piece_of
        )


def _is_plain_sum(call: Call) -> bool:
    return call.kernel == "pm_sum" or (call.kernel == "pm_mm" and call.arguments[-1] == 0)


_SUMS: Final = ("pm_mm", "pm_sum")
"""Kernels whose results for pieces can be summed one after the other."""


def _contiguous_sequence(pairs: Iterable[tuple[int, int]], elements: int) -> tuple[int, int]:
    """Return (length of a contiguous sequence, distance to the next) of loops [elements].

    `pairs` are (stride, size), sorted by stride.
    """
    length = 1
    for step, size in pairs:
        if step == length:
            length *= size
        elif step > length and size > 1:
            return length, step
    return length, elements


def _tensors_in_same_loop(
    call: Call, name: str, pieces: _Pieces, buffers: Mapping[str, Buffer]
) -> Iterator[tuple[str, _Pieces]]:
    """Yield (tensor, pieces) for other tensors of a call that `pieces` of tensor `name` divide."""
    loops = loops_of(call)
    if (
        loops is None
        or name not in call.buffers
        or _restrict_to_piece(loops, {name: pieces}) is not None
    ):
        return
    for number, ref in enumerate(loops.refs):
        for _, piece_loops in pieces.split_loops(loops, number) if ref.buffer == name else ():
            if not all(
                _restrict_to_piece(part, {name: pieces})
                for part in (piece_loops[0], piece_loops[-1])
            ):
                continue
            for other_ref in loops.refs:
                distance = _piece_distance(piece_loops, other_ref.buffer)
                if other_ref.buffer != name and distance > 0:
                    outer, remainder = divmod(
                        buffers[other_ref.buffer].elements, distance * pieces.count
                    )
                    if not remainder and outer:
                        yield other_ref.buffer, _Pieces(outer, pieces.count, distance)
            return


def _piece_distance(piece_loops: Sequence[Loops], name: str) -> int:
    """Return the distance between the first two loops in tensor `name` [elements]."""
    first, second = (
        next(ref.offset for ref in part.refs if ref.buffer == name) for part in piece_loops[:2]
    )
    return second - first


def _covers(
    piece_calls: Sequence[_DividedCall], pieces: Mapping[str, _Pieces], outputs: set[str]
) -> bool:
    """Return whether divided calls write each piece of their only result, without sums."""
    if len(outputs) != 1:
        return False
    (name,) = outputs
    written = [[part.piece_of.get(name) for part in call.piece_calls] for call in piece_calls]
    distinct = all(len(set(call)) == len(call) for call in written)
    return distinct and {t for call in written for t in call} == set(range(pieces[name].count))


# -- the step in pieces ----------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Operation:
    """A node of the new step, with its calls."""

    node: Node
    calls: tuple[Call, ...]


class _Rewriter:
    """Builder of the step with divided tensors, and nodes in a new order."""

    def __init__(self, division: _Division) -> None:
        """Prepare an empty step; `step` adds the nodes."""
        self.division = division
        self.whole = division.step
        self.graph = division.graph
        self.buffers = {
            name: buffer
            for name, buffer in division.step.buffers.items()
            if name not in division.pieces or name in division.whole
        }
        self.aliases: dict[str, tuple[str, np.ndarray]] = {}
        """(buffer, indices of elements) of each piece that equals elements of another buffer."""
        self.early: list[_Operation] = []
        """Nodes to place as soon as their inputs are computed, in the order of this list."""
        self.late: dict[str, _Operation] = {}
        """Nodes to place before the first reader of their result, by result."""
        self.fixed: dict[int, _Operation] = {}
        """Nodes that stay at their old position, by position."""
        self.ready: dict[str, int] = {}
        """For each tensor, the index of the old node after which it can be computed."""

    def step(self) -> LoweredStep:
        """Build the new step."""
        for k, node in enumerate(self.graph.nodes):
            if k in self.division.producers:
                self._add_piece_nodes(k)
            self.ready.update((tensor.name, k) for tensor in node.outputs)
            if k in self.division.consumers:
                self._add_consumer(k)
            elif k not in self.division.producers:
                self.fixed[k] = _Operation(node=node, calls=self.whole.calls[k])
        operations = list(self._execution_order())
        return self.whole.with_nodes(
            (operation.node for operation in operations),
            (operation.calls for operation in operations),
            buffers=self.buffers,
        )

    def _add_piece_nodes(self, k: int) -> None:
        """Add a node for each piece of the result of node `k`, except pieces that are aliases."""
        node, (result,) = self.graph.nodes[k], self.graph.nodes[k].outputs
        pieces = self.division.pieces[result.name]
        piece_calls = [part for call in self.division.producers[k] for part in call.piece_calls]
        buffer = Buffer(elements=pieces.elements, type=self.whole.buffers[result.name].type)
        readers = self.division.readers(result.name)
        for t in range(pieces.count):
            own_calls, name = (
                [part for part in piece_calls if part.piece_of[result.name] == t],
                _piece_name(result.name, t),
            )
            source = self._find_alias(own_calls, pieces)
            if source is not None and all(
                _resolve_alias(part.loops, result.name, source) for part in readers[t]
            ):
                self.aliases[name] = source
                continue
            calls, read = self._rename_pieces(own_calls)
            read.pop(name)
            self.buffers[name] = buffer
            self.ready[name] = max((self.ready.get(operand, -1) for operand in read), default=-1)
            operation = _Operation(
                node=replace(
                    node,
                    name=_piece_name(node.name, t),
                    inputs=tuple(operand for operand in read if operand in self.ready),
                    outputs=(Tensor(name=name, bytes=buffer.bytes),),
                    flops=_piece_flops(node.flops, t, pieces.count),
                    bytes_moved=None,
                    in_place=self._in_place(name, calls),
                ),
                calls=calls,
            )
            reads_pieces = any(len(part.piece_of) > 1 for part in own_calls)
            if node.phase == Phase.BACKWARD and reads_pieces:
                self.early.append(operation)
            else:
                self.late[name] = operation

    def _find_alias(
        self, piece_calls: Sequence[_PieceCall], pieces: _Pieces
    ) -> tuple[str, np.ndarray] | None:
        """Return (buffer, elements) of which a piece is a copy; None unless one copy computes it.

        Inputs of the step stay in memory until its end, so any elements of them can be aliases.
        """
        if len(piece_calls) != 1 or piece_calls[0].call.kernel != "pm_copy":
            return None
        copy = self._resolved_loops(piece_calls[0])
        if copy is None:
            return None
        target, source = (np.broadcast_to(copy.elements(k), copy.sizes) for k in range(2))
        name = copy.refs[1].buffer
        differs_in_size = name in self.ready and self.buffers[name].elements != pieces.elements
        if (
            name in self.division.state
            or differs_in_size
            or len(np.unique(target)) != pieces.elements
        ):
            return None
        elements = np.empty(pieces.elements, dtype=int)
        elements[target] = source
        return name, elements

    def _rename_pieces(
        self, piece_calls: Sequence[_PieceCall]
    ) -> tuple[tuple[Call, ...], dict[str, None]]:
        """Return (calls with the new names of pieces, names of the buffers that these access)."""
        calls = []
        for part in piece_calls:
            loops = self._resolved_loops(part)
            call = part.call if loops is None else loops.as_call()
            if call is None:
                raise TypeError(part)
            calls.append(call)
        return tuple(calls), dict.fromkeys(name for call in calls for name in call.buffers)

    def _resolved_loops(self, piece_call: _PieceCall) -> Loops | None:
        """Return the loops of a call on pieces, with the new buffer of each piece.

        A piece that is an alias is accessed in the buffer that it aliases. None if the call has no
        loops, or its kernel cannot access the aliased elements.
        """
        loops = piece_call.loops
        for name, t in piece_call.piece_of.items():
            alias = self.aliases.get(_piece_name(name, t))
            loops = (
                _rename_buffer(loops, name, _piece_name(name, t))
                if alias is None
                else _resolve_alias(loops, name, alias)
            )
        return loops

    def _in_place(self, out: str, calls: Sequence[Call]) -> tuple[tuple[str, str], ...]:
        """Return the (output, input) pair if the only call may overwrite an input, otherwise ().

        The input must be no state, of equal size and type, and be accessed in the same order.
        """
        loops = loops_of(calls[0]) if len(calls) == 1 and is_by_element(calls[0]) else None
        if loops is None or loops.refs[0] != Ref(out):
            return ()
        for ref, steps in zip(loops.refs[1:], loops.steps[1:], strict=True):
            buffer_steps = [
                s for r, s in zip(loops.refs, loops.steps, strict=True) if r.buffer == ref.buffer
            ]
            if (
                steps == loops.steps[0]
                and ref.offset == 0
                and buffer_steps == [steps]
                and ref.buffer in self.ready
                and ref.buffer not in self.division.state
                and self.buffers[ref.buffer] == self.buffers[out]
            ):
                return ((out, ref.buffer),)
        return ()

    def _add_consumer(self, k: int) -> None:
        """Replace node `k` by a node that reads pieces, or by a chain of nodes that sum pieces."""
        node, piece_calls = self.graph.nodes[k], self.division.consumers[k]
        if any(len(call.piece_calls) > 1 and call.is_sum for call in piece_calls):
            self._add_sum_chain(k, piece_calls[0].piece_calls)
            return
        calls, accessed = self._rename_pieces(
            [part for call in piece_calls for part in call.piece_calls]
        )
        outputs = {tensor.name for tensor in node.outputs}
        pairs = tuple(pair for pair in node.in_place if pair[1] in accessed)
        if not pairs and len(outputs) == 1:
            pairs = self._in_place(node.outputs[0].name, calls)
        inputs = tuple(name for name in accessed if name in self.ready and name not in outputs)
        updated = tuple(
            name
            for name in node.inputs
            if name in outputs or (name in self.ready and name in accessed)
        )
        self.fixed[k] = _Operation(
            node=replace(
                node,
                inputs=tuple(dict.fromkeys((*updated, *inputs))),
                bytes_moved=None,
                in_place=pairs,
            ),
            calls=calls,
        )

    def _add_sum_chain(self, k: int, piece_calls: Sequence[_PieceCall]) -> None:
        """Add a chain of nodes in place of node `k`: each adds pieces ready at the same time."""
        node, (result,) = self.graph.nodes[k], self.graph.nodes[k].outputs
        terms = []
        for number, part in enumerate(piece_calls):
            (call,), accessed = self._rename_pieces([part])
            accessed.pop(result.name)
            read = tuple(name for name in accessed if name in self.ready)
            ready = max((self.ready[name] for name in read), default=-1)
            terms.append((ready, number, call, read))
        previous, links = "", [list(group) for _, group in groupby(sorted(terms), lambda f: f[0])]
        for link in links:
            last = link is links[-1]
            name = result.name if last else _piece_name(result.name, link[0][1])
            calls: list[Call] = []
            if previous:
                count = self.whole.buffers[result.name].elements
                calls.append(Call("pm_copy", (Ref(name), Ref(previous), (1, count, 1, 1))))
            for _, _, call, _ in link:
                calls += (
                    self._addition_calls(call, result.name, name)
                    if calls
                    else [_write_to(call, name)]
                )
            read = tuple(dict.fromkeys(name_read for *_, names in link for name_read in names))
            needs_workspace = any(WORKSPACE in call.buffers for call in calls)
            self.buffers[name] = self.whole.buffers[result.name]
            self.early.append(
                _Operation(
                    node=replace(
                        node,
                        name=node.name if last else _piece_name(node.name, link[0][1]),
                        inputs=(*read, previous) if previous else read,
                        outputs=(replace(result, name=name),),
                        flops=sum(
                            _piece_flops(node.flops, t, len(piece_calls)) for _, t, *_ in link
                        ),
                        bytes_moved=None,
                        workspace_bytes=result.bytes if needs_workspace else 0,
                        in_place=((name, previous),) if previous else (),
                    ),
                    calls=tuple(calls),
                )
            )
            previous = name

    def _addition_calls(self, call: Call, whole: str, out: str) -> list[Call]:
        """Return calls that add the result of `call` to buffer `out`."""
        if call.kernel == "pm_mm":
            return [replace(_write_to(call, out), arguments=(Ref(out), *call.arguments[1:-1], 1))]
        loops = loops_of(call)
        if loops is None:
            raise TypeError(call)
        count = self.whole.buffers[whole].elements
        rank = call.arguments[2][0] if isinstance(call.arguments[2], tuple) else 0
        if prod(loops.sizes[rank:]) == 1 and call.arguments[4] == 1.0:
            table = shape_table((loops.sizes, loops.steps[0], loops.steps[0], loops.steps[1]))
            if table is not None:
                return [Call("pm_add", (Ref(out), Ref(out), loops.refs[1], table, 1.0))]
        total = Call("pm_add", (Ref(out), Ref(out), Ref(WORKSPACE), (1, count, 1, 1, 1), 1.0))
        return [_write_to(call, WORKSPACE), total]

    # -- order -------------------------------------------------------------------------------------

    def _execution_order(self) -> Iterator[_Operation]:
        """Yield all nodes, each after the nodes of its inputs, and before an input is replaced."""
        computed: set[str] = set()
        early_operations = list(self.early)

        def is_ready(operation: _Operation) -> bool:
            return all(
                name in computed or (name in self.late and is_ready(self.late[name]))
                for name in operation.node.inputs
            )

        def with_inputs(operation: _Operation) -> Iterator[_Operation]:
            for name in operation.node.inputs:
                if name in self.late:
                    yield from with_inputs(self.late.pop(name))
            computed.update(tensor.name for tensor in operation.node.outputs)
            yield operation

        for k in sorted(self.fixed):
            operation = self.fixed[k]
            replaced = {tensor.replaces for tensor in operation.node.outputs}
            for name in [n for n, late in self.late.items() if replaced & set(late.node.inputs)]:
                if name in self.late:
                    yield from with_inputs(self.late.pop(name))
            yield from with_inputs(operation)
            while (ready := next(filter(is_ready, early_operations), None)) is not None:
                early_operations.remove(ready)
                yield from with_inputs(ready)


def _rename_buffer(loops: Loops | None, name: str, new: str) -> Loops | None:
    if loops is None:
        return None
    refs = (replace(ref, buffer=new) if ref.buffer == name else ref for ref in loops.refs)
    return replace(loops, refs=tuple(refs))


def _resolve_alias(loops: Loops | None, name: str, source: tuple[str, np.ndarray]) -> Loops | None:
    """Return loops that access a piece in the buffer of its alias; None if the kernel cannot."""
    for number, ref in enumerate(loops.refs if loops else ()):
        if loops is not None and ref.buffer == name:
            loops = loops.with_elements(number, source[0], source[1][loops.elements(number)])
    return None if loops is None or loops.as_call() is None else loops


def _piece_name(name: str, t: int) -> str:
    return f"{name}[{t}]"


def _piece_flops(total_flops: int, number: int, count: int) -> int:
    return total_flops * (number + 1) // count - total_flops * number // count


def _write_to(call: Call, out: str) -> Call:
    return replace(call, arguments=(Ref(out), *call.arguments[1:]))


# -- products that are added -----------------------------------------------------------------------


def _fuse_gradient_sums(step: LoweredStep) -> LoweredStep:
    """Fuse products with their addition to the gradient of the same weight, in place.

    An example are the gradients of two time steps. The fused node is at the position of the
    product, where the other gradient is already computed. Returns `step` itself if unchanged.
    """
    graph = step.graph
    returned = step.returned_buffers
    nodes: list[tuple[Node, tuple[Call, ...]]] = []
    position_of: dict[str, int] = {}
    removed: set[str] = set()
    for k, (node, calls) in enumerate(zip(graph.nodes, step.calls, strict=True)):
        match calls:
            case (Call("pm_add", (Ref(out, 0), Ref(x, 0), Ref(y, 0), (1, n, 1, 1, 1), 1.0)),) if (
                x != y and x in position_of and y in position_of
            ):
                previous, product = sorted((x, y), key=position_of.__getitem__)
            case _:
                previous = product = out = ""
                n = 0
        maker, product_calls = nodes[position_of[product]] if product else (node, calls)
        if (
            product not in returned
            and product
            and graph.users_of[graph.tensor_index[product]] == (k,)
            and _is_weight_gradient(product_calls, product, n)
            and _is_gradient_sum(*nodes[position_of[previous]])
        ):
            removed.add(product)
            position_of[out] = position_of[product]
            copy = Call("pm_copy", (Ref(out), Ref(previous), (1, n, 1, 1)))
            adding = replace(
                product_calls[0], arguments=(Ref(out), *product_calls[0].arguments[1:-1], 1)
            )
            fused_node = replace(
                maker,
                name=node.name,
                inputs=(*maker.inputs, previous),
                outputs=node.outputs,
                flops=maker.flops + node.flops,
                bytes_moved=None,
                in_place=((out, previous),),
            )
            nodes[position_of[product]] = fused_node, (copy, adding)
        else:
            position_of.update((tensor.name, len(nodes)) for tensor in node.outputs)
            nodes.append((node, calls))
    if not removed:
        return step
    return step.with_nodes(
        (node for node, _ in nodes),
        (calls for _, calls in nodes),
        buffers={name: buffer for name, buffer in step.buffers.items() if name not in removed},
    )


def _is_weight_gradient(calls: Sequence[Call], name: str, elements: int) -> bool:
    """Return whether the calls are one product that computes the gradient `name` of a weight."""
    match calls:
        case (Call("pm_mm", (Ref(out, 0), _, _, int(m), _, int(n), int(row), 1, _, _, 1, 0)),):
            return out == name and row == n and m * n == elements
    return False


def _is_gradient_sum(node: Node, calls: Sequence[Call]) -> bool:
    """Return whether a node computes the gradient of a weight, or adds to it."""
    match calls:
        case (*_, Call("pm_mm", (_, _, _, _, _, _, _, 1, _, _, 1, _))):
            return node.phase == Phase.BACKWARD
    return False
