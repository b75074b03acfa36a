"""Products over all time steps of an unrolled network, as products of one time step each.

PyTorch stacks what the steps of a recurrent layer made, so that one product makes the gradient of a
weight: all pieces and the stack are in RAM at once then. Here each piece goes into the sum as soon
as it is there. Numbers are summed in another order; nothing else changes.
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


def unrolled(step: LoweredStep) -> LoweredStep:
    """Return a step without the stacks of time steps over which gradients of weights are summed.

    What is computed for all time steps at once is computed for each of them, where that is read by
    time steps too: gates from inputs, and gradients of inputs. A product that is added to the
    gradient of a shared weight is summed in its memory.
    """
    rewritten = split_fused_updates(step)
    cut = _Cut(rewritten)
    if cut.pieces:
        rewritten = _Rewriting(cut).step()
    added = _added(rewritten)
    return step if added is step or (not cut.pieces and added is rewritten) else fuse_updates(added)


# -- pieces of tensors -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How a tensor is cut: it lies as `outer` times `count` times `inner` elements."""

    outer: int
    count: int
    inner: int

    @property
    def elements(self) -> int:
        """Of one piece."""
        return self.outer * self.inner

    def touched(self, loops: Loops, number: int) -> tuple[int, Loops] | None:
        """Return the only piece that loops touch of a tensor, and the loops over that piece."""
        elements = loops.elements(number)
        rows = elements // self.inner
        piece = int(rows.flat[0]) % self.count
        if (rows % self.count != piece).any():
            return None
        inside = rows // self.count * self.inner + elements % self.inner
        moved = loops.with_elements(number, loops.refs[number].buffer, inside)
        return None if moved is None else (piece, moved)

    def parts(self, loops: Loops, number: int) -> Iterator[tuple[int, list[Loops]]]:
        """Yield each dimension by which loops over a tensor can go piece by piece, with these."""
        for d, (size, step) in enumerate(zip(loops.sizes, loops.steps[number], strict=True)):
            rows, rest = divmod(self.inner, step) if step > 0 else (0, 1)
            rows = min(rows, size // self.count)
            if rows and not rest and size in (rows * self.count, rows * self.count * self.outer):
                yield (
                    d,
                    [loops.subset(d, t, rows=rows, count=self.count) for t in range(self.count)],
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A call, or one of the calls that it becomes, and which pieces that touches."""

    call: Call
    loops: Loops | None = None
    """None where it touches no pieces."""
    of: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What becomes of a call: one part, or one for each piece."""

    parts: tuple[_Part, ...]
    is_sum: bool = False
    """Whether its parts are summed, in one result."""


def _inside(loops: Loops, pieces: Mapping[str, _Pieces]) -> _Part | None:
    """Return a call that touches one piece of each tensor that is cut."""
    of: dict[str, int] = {}
    for number, ref in enumerate(loops.refs):
        if ref.buffer in pieces:
            touched = pieces[ref.buffer].touched(loops, number)
            if touched is None or of.setdefault(ref.buffer, touched[0]) != touched[0]:
                return None
            loops = touched[1]
    call = loops.as_call()
    return None if call is None else _Part(call=call, loops=loops, of=of)


def _parts(call: Call, pieces: Mapping[str, _Pieces]) -> _Parts | None:
    """Return what a call becomes where tensors are cut; None where it cannot be cut so."""
    if not pieces.keys() & set(call.buffers):
        return _Parts(parts=(_Part(call=call),))
    loops = loops_of(call)
    if loops is None:
        return None
    whole = _inside(loops, pieces)
    if whole is not None:
        return _Parts(parts=(whole,))
    for number, ref in enumerate(loops.refs):
        for d, parts in pieces[ref.buffer].parts(loops, number) if ref.buffer in pieces else ():
            cut = [part for piece in parts if (part := _inside(piece, pieces)) is not None]
            if len(cut) == len(parts):
                return _Parts(parts=tuple(cut), is_sum=loops.steps[0][d] == 0)
    return None


class _Cut:
    """Which tensors of a step are cut into pieces, and what becomes of the nodes around them."""

    def __init__(self, step: LoweredStep) -> None:
        self.step = step
        self.graph = step.graph
        self._kept = step.returned_buffers
        self.state = {self.graph.tensors[i].name for i in self.graph.state_tensors}
        self._around: dict[str, list[int]] = {}
        for k, calls in enumerate(step.calls):
            for name in dict.fromkeys(name for call in calls for name in call.buffers):
                self._around.setdefault(name, []).append(k)
        self.pieces: dict[str, _Pieces] = {}
        self.whole: set[str] = set()
        """Tensors in pieces that are also there as a whole: stacks that some nodes cannot cut."""
        self.consumers: dict[int, list[_Parts]] = {}
        """For each node that touches a tensor in pieces its calls."""
        self.producers: dict[int, list[_Parts]] = {}
        """For each node whose result is in pieces its calls."""
        self._known: dict[tuple[int, tuple[tuple[str, _Pieces], ...]], list[_Parts] | None] = {}
        self._propose()
        while self.pieces and not self._settle():
            pass

    def is_copy(self, k: int) -> bool:
        """Return whether a node only copies, so that its pieces are there anyway."""
        return all(call.kernel == "pm_copy" for call in self.step.calls[k])

    # -- which tensors ---------------------------------------------------------------------------

    def _may_cut(self, name: str) -> bool:
        i = self.graph.tensor_index.get(name)
        if i is None or name in self._kept or name not in self._around:
            return False
        node = self.graph.nodes[self.graph.node_of[i]]
        plain = node.recomputable and not node.workspace_bytes and len(node.outputs) == 1
        return plain and not node.is_state and self.step.buffers[name].type is DataType.REAL

    def _propose(self) -> None:
        """Cut stacks over which gradients of weights are summed, and what goes along with them."""
        for k in range(len(self.graph.nodes)):
            name, pieces = self._stack(k)
            if pieces is not None and self._pays(name, pieces):
                self._propose_around(name, pieces)
        counts = {pieces.count for pieces in self.pieces.values()}
        for tensor in self.graph.tensors if counts else ():
            if tensor.name not in self.pieces and self._may_cut(tensor.name):
                for pieces in self._sliced(tensor.name, counts):
                    self._propose_around(tensor.name, pieces)

    def _stack(self, k: int) -> tuple[str, _Pieces | None]:
        """Return the result of a node that copies pieces of one size, one after the other."""
        node, calls = self.graph.nodes[k], self.step.calls[k]
        if len(calls) <= 1 or len(node.outputs) != 1 or not self.is_copy(k):
            return "", None
        name = node.outputs[0].name
        inner, rest = divmod(self.step.buffers[name].elements, len(calls))
        pieces = _Pieces(1, len(calls), inner)
        if rest or not inner or not self._may_cut(name):
            return "", None
        copies = [_parts(call, {name: pieces}) for call in calls]
        order = [copy.parts[0].of.get(name) if copy else None for copy in copies]
        return name, pieces if order == list(range(len(calls))) else None

    def _pays(self, name: str, pieces: _Pieces) -> bool:
        """Return whether a stack takes more memory than what its pieces are summed up to."""
        sums = {
            call.arguments[0]
            for k in self._around[name]
            for call in self.step.calls[k]
            if len(self.step.calls[k]) == 1 and self._sums_up(call, name, pieces)
        }
        results = [self.step.buffers[ref.buffer].bytes for ref in sums if isinstance(ref, Ref)]
        return 0 < sum(results) < self.step.buffers[name].bytes

    def _sums_up(self, call: Call, name: str, pieces: _Pieces) -> bool:
        """Return whether a call sums pieces up: by themselves, or times another activation."""
        parts = _parts(call, {name: pieces})
        others = {ref.buffer for ref in call_refs(call)[1:]} - {name}
        return (
            parts is not None and parts.is_sum and call.kernel in _SUMS and not others & self.state
        )

    def _propose_around(self, name: str, pieces: _Pieces) -> None:
        """Cut a tensor, and those that calls go through beside it in the same loop."""
        todo = {name: pieces}
        while todo:
            name, pieces = todo.popitem()
            self.pieces[name] = pieces
            for k in self._around[name]:
                for call in self.step.calls[k]:
                    for other, cut in _beside(call, name, pieces, self.step.buffers):
                        if other not in self.pieces and self._may_cut(other):
                            todo.setdefault(other, cut)

    def _sliced(self, name: str, counts: set[int]) -> list[_Pieces]:
        """Return how a tensor is cut of which each reader touches one of so many pieces."""
        elements = self.step.buffers[name].elements
        readers = [k for k in self._around[name] if k != self._maker(name)]
        for k in readers[:1]:
            for call in self.step.calls[k]:
                loops = loops_of(call) if name in call.buffers else None
                for number, ref in enumerate(loops.refs if loops else ()):
                    if loops and ref.buffer == name:
                        pairs = sorted(zip(loops.steps[number], loops.sizes, strict=True))
                        inner, apart = _run(pairs, elements)
                        count = apart // inner
                        if count in counts and elements % apart == 0:
                            return [_Pieces(elements // apart, count, inner)]
        return []

    def _maker(self, name: str) -> int:
        return self.graph.node_of[self.graph.tensor_index[name]]

    # -- what becomes of nodes ---------------------------------------------------------------------

    def _settle(self) -> bool:
        """State what becomes of each node; leave tensors whole where that cannot be."""
        self.whole, self.consumers, self.producers = set(), {}, {}
        used: set[str] = set()
        for k in sorted({k for name in self.pieces for k in self._around[name]}, reverse=True):
            outputs = {tensor.name for tensor in self.graph.nodes[k].outputs}
            cut = outputs & self.pieces.keys()
            if cut and not self._takes(k, self.producers, cut):
                return self._leave(cut)
            if (not cut or cut & self.whole) and not self._takes(k, self.consumers, set()):
                return self._leave(set(self._touched(k)) - outputs)
            used |= self._read(k) - outputs
        return used >= self.pieces.keys() or self._leave(self.pieces.keys() - used)

    def _takes(self, k: int, to: dict[int, list[_Parts]], outputs: set[str]) -> bool:
        """State the calls of a node whose result is in pieces, or whole; return whether it can be.

        Pieces that are there anyway may also be taken as a whole.
        """
        others = {tensor.name for tensor in self.graph.nodes[k].outputs} - outputs
        every = [name for name in self._touched(k) if name not in others]
        for names in (every, [n for n in every if n in outputs or not self._is_copied(n)]):
            parts = self._calls(k, names)
            if parts is not None and (
                _covers(parts, self.pieces, outputs) or self._may_be(k, parts)
            ):
                to[k] = parts
                self.whole |= set(every) - set(names)
                return True
        return False

    def _read(self, k: int) -> set[str]:
        """Return which tensors a node takes in pieces."""
        parts = (*self.producers.get(k, ()), *self.consumers.get(k, ()))
        return {name for call in parts for part in call.parts for name in part.of}

    def readers(self, name: str) -> list[list[_Part]]:
        """Return for each piece of a tensor the parts of calls that read it."""
        readers: list[list[_Part]] = [[] for _ in range(self.pieces[name].count)]
        maker = self._maker(name)
        for k in self._around[name]:
            produced = self.producers.get(k, []) if k != maker else []
            for call in (*produced, *self.consumers.get(k, [])):
                for part in call.parts:
                    if name in part.of:
                        readers[part.of[name]].append(part)
        return readers

    def _leave(self, names: Iterable[str]) -> bool:
        for name in names:
            del self.pieces[name]
        return False

    def _touched(self, k: int) -> list[str]:
        named = {name for call in self.step.calls[k] for name in call.buffers}
        return [name for name in self.pieces if name in named]

    def _is_copied(self, name: str) -> bool:
        return self.is_copy(self._maker(name))

    def _calls(self, k: int, names: Sequence[str]) -> list[_Parts] | None:
        """Return what becomes of the calls of a node where tensors are cut; None if nothing can."""
        key = (k, tuple((name, self.pieces[name]) for name in names))
        if key not in self._known:
            calls = [_parts(call, dict(key[1])) for call in self.step.calls[k]]
            self._known[key] = (
                None if None in calls else [call_parts for call_parts in calls if call_parts]
            )
        return self._known[key]

    def _may_be(self, k: int, parts: list[_Parts]) -> bool:
        """Return whether a node whose result is whole can go so.

        It takes one piece of each tensor, or sums pieces up. Where it puts pieces side by side it
        reads all at once, which is for those that are there anyway.
        """
        cut = [call for call in parts if len(call.parts) > 1]
        if not cut:
            return True
        node = self.graph.nodes[k]
        if len(node.outputs) != 1 or node.workspace_bytes or not node.recomputable:
            return False
        if any(call.is_sum for call in cut):
            return len(parts) == 1 and _is_plain_sum(self.step.calls[k][0])
        return all(self._is_copied(n) for call in cut for part in call.parts for n in part.of)


def _is_plain_sum(call: Call) -> bool:
    return call.kernel == "pm_sum" or (call.kernel == "pm_mm" and call.arguments[-1] == 0)


_SUMS: Final = ("pm_mm", "pm_sum")
"""Kernels whose parts can be summed up one after the other."""


def _run(pairs: Iterable[tuple[int, int]], elements: int) -> tuple[int, int]:
    """Return how many elements are read one after the other, and how far the next ones are."""
    run = 1
    for step, size in pairs:
        if step == run:
            run *= size
        elif step > run and size > 1:
            return run, step
    return run, elements


def _beside(
    call: Call, name: str, pieces: _Pieces, buffers: Mapping[str, Buffer]
) -> Iterator[tuple[str, _Pieces]]:
    """Yield the other tensors of a call that goes piece by piece, and how these are cut then."""
    loops = loops_of(call)
    if loops is None or name not in call.buffers or _inside(loops, {name: pieces}) is not None:
        return
    for number, ref in enumerate(loops.refs):
        for _, parts in pieces.parts(loops, number) if ref.buffer == name else ():
            if not all(_inside(part, {name: pieces}) for part in (parts[0], parts[-1])):
                continue
            for other in loops.refs:
                between = _between(parts, other.buffer)
                if other.buffer != name and between > 0:
                    outer, rest = divmod(buffers[other.buffer].elements, between * pieces.count)
                    if not rest and outer:
                        yield other.buffer, _Pieces(outer, pieces.count, between)
            return


def _between(parts: Sequence[Loops], name: str) -> int:
    """Return how far apart two parts begin in a tensor [elements]."""
    first, second = (
        next(ref.offset for ref in part.refs if ref.buffer == name) for part in parts[:2]
    )
    return second - first


def _covers(parts: Sequence[_Parts], pieces: Mapping[str, _Pieces], outputs: set[str]) -> bool:
    """Return whether calls write each piece of their only result, and sum nothing up in one."""
    if len(outputs) != 1:
        return False
    (name,) = outputs
    written = [[part.of.get(name) for part in call.parts] for call in parts]
    distinct = all(len(set(call)) == len(call) for call in written)
    return distinct and {t for call in written for t in call} == set(range(pieces[name].count))


# -- the step in pieces ----------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Operation:
    """A node of the new step."""

    node: Node
    calls: tuple[Call, ...]


class _Rewriting:
    """A step whose tensors are cut into pieces, and its nodes in a new order."""

    def __init__(self, cut: _Cut) -> None:
        self.cut = cut
        self.whole = cut.step
        self.graph = cut.graph
        self.buffers = {
            name: buffer
            for name, buffer in cut.step.buffers.items()
            if name not in cut.pieces or name in cut.whole
        }
        self.aliases: dict[str, tuple[str, np.ndarray]] = {}
        """Pieces that are there already: which elements of what."""
        self.early: list[_Operation] = []
        """Nodes that come as soon as what they read is there, in this order."""
        self.late: dict[str, _Operation] = {}
        """By their results: nodes that come before the first one that reads them."""
        self.fixed: dict[int, _Operation] = {}
        """The nodes that stay where they were."""
        self.ready: dict[str, int] = {}
        """For each tensor after which old node it can be there."""

    def step(self) -> LoweredStep:
        """Return the new step."""
        for k, node in enumerate(self.graph.nodes):
            if k in self.cut.producers:
                self._make_pieces(k)
            self.ready.update((tensor.name, k) for tensor in node.outputs)
            if k in self.cut.consumers:
                self._take_pieces(k)
            elif k not in self.cut.producers:
                self.fixed[k] = _Operation(node=node, calls=self.whole.calls[k])
        operations = list(self._in_order())
        return self.whole.with_nodes(
            (operation.node for operation in operations),
            (operation.calls for operation in operations),
            buffers=self.buffers,
        )

    def _make_pieces(self, k: int) -> None:
        """Add a node for each piece of a result, but for those that are elsewhere already."""
        node, (result,) = self.graph.nodes[k], self.graph.nodes[k].outputs
        pieces = self.cut.pieces[result.name]
        parts = [part for call in self.cut.producers[k] for part in call.parts]
        buffer = Buffer(elements=pieces.elements, type=self.whole.buffers[result.name].type)
        readers = self.cut.readers(result.name)
        for t in range(pieces.count):
            own, name = [part for part in parts if part.of[result.name] == t], _of(result.name, t)
            source = self._source(own, pieces)
            if source is not None and all(
                _moved(part.loops, result.name, source) for part in readers[t]
            ):
                self.aliases[name] = source
                continue
            calls, read = self._renamed(own)
            read.pop(name)
            self.buffers[name] = buffer
            self.ready[name] = max((self.ready.get(operand, -1) for operand in read), default=-1)
            operation = _Operation(
                node=replace(
                    node,
                    name=_of(node.name, t),
                    inputs=tuple(operand for operand in read if operand in self.ready),
                    outputs=(Tensor(name=name, bytes=buffer.bytes),),
                    flops=_share(node.flops, t, pieces.count),
                    bytes_moved=None,
                    in_place=self._in_place(name, calls),
                ),
                calls=calls,
            )
            reads_pieces = any(len(part.of) > 1 for part in own)
            if node.phase == Phase.BACKWARD and reads_pieces:
                self.early.append(operation)
            else:
                self.late[name] = operation

    def _source(self, parts: Sequence[_Part], pieces: _Pieces) -> tuple[str, np.ndarray] | None:
        """Return where a piece lies already, if all that makes it is a copy of that.

        Inputs of the step lie where they are to its end, and may lie in any way.
        """
        if len(parts) != 1 or parts[0].call.kernel != "pm_copy":
            return None
        copy = self._loops_of(parts[0])
        if copy is None:
            return None
        to, of = (np.broadcast_to(copy.elements(k), copy.sizes) for k in range(2))
        name = copy.refs[1].buffer
        apart = name in self.ready and self.buffers[name].elements != pieces.elements
        if name in self.cut.state or apart or len(np.unique(to)) != pieces.elements:
            return None
        elements = np.empty(pieces.elements, dtype=int)
        elements[to] = of
        return name, elements

    def _renamed(self, parts: Sequence[_Part]) -> tuple[tuple[Call, ...], dict[str, None]]:
        """Return the calls of parts, with pieces by their names, and what they touch."""
        calls = []
        for part in parts:
            loops = self._loops_of(part)
            call = part.call if loops is None else loops.as_call()
            if call is None:
                raise TypeError(part)
            calls.append(call)
        return tuple(calls), dict.fromkeys(name for call in calls for name in call.buffers)

    def _loops_of(self, part: _Part) -> Loops | None:
        """Return the loops of a part, with pieces by their names, or where these lie."""
        loops = part.loops
        for name, t in part.of.items():
            source = self.aliases.get(_of(name, t))
            loops = (
                _renaming(loops, name, _of(name, t))
                if source is None
                else _moved(loops, name, source)
            )
        return loops

    def _in_place(self, out: str, calls: Sequence[Call]) -> tuple[tuple[str, str], ...]:
        """Return which input a result may take over: one that its only call goes through alike."""
        loops = loops_of(calls[0]) if len(calls) == 1 and is_by_element(calls[0]) else None
        if loops is None or loops.refs[0] != Ref(out):
            return ()
        for ref, steps in zip(loops.refs[1:], loops.steps[1:], strict=True):
            others = [
                s for r, s in zip(loops.refs, loops.steps, strict=True) if r.buffer == ref.buffer
            ]
            if (
                steps == loops.steps[0]
                and ref.offset == 0
                and others == [steps]
                and ref.buffer in self.ready
                and ref.buffer not in self.cut.state
                and self.buffers[ref.buffer] == self.buffers[out]
            ):
                return ((out, ref.buffer),)
        return ()

    def _take_pieces(self, k: int) -> None:
        """Add a node that reads pieces, or a chain of nodes that sum them up."""
        node, parts = self.graph.nodes[k], self.cut.consumers[k]
        if any(len(call.parts) > 1 and call.is_sum for call in parts):
            self._sum_up(k, parts[0].parts)
            return
        calls, touched = self._renamed([part for call in parts for part in call.parts])
        outputs = {tensor.name for tensor in node.outputs}
        pairs = tuple(pair for pair in node.in_place if pair[1] in touched)
        if not pairs and len(outputs) == 1:
            pairs = self._in_place(node.outputs[0].name, calls)
        inputs = tuple(name for name in touched if name in self.ready and name not in outputs)
        updated = tuple(
            name
            for name in node.inputs
            if name in outputs or (name in self.ready and name in touched)
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

    def _sum_up(self, k: int, parts: Sequence[_Part]) -> None:
        """Add a chain of nodes: each sums up pieces that are there at the same time."""
        node, (result,) = self.graph.nodes[k], self.graph.nodes[k].outputs
        terms = []
        for number, part in enumerate(parts):
            (call,), touched = self._renamed([part])
            touched.pop(result.name)
            read = tuple(name for name in touched if name in self.ready)
            ready = max((self.ready[name] for name in read), default=-1)
            terms.append((ready, number, call, read))
        before, links = "", [list(group) for _, group in groupby(sorted(terms), lambda f: f[0])]
        for link in links:
            last = link is links[-1]
            name = result.name if last else _of(result.name, link[0][1])
            calls: list[Call] = []
            if before:
                count = self.whole.buffers[result.name].elements
                calls.append(Call("pm_copy", (Ref(name), Ref(before), (1, count, 1, 1))))
            for _, _, call, _ in link:
                calls += self._adding(call, result.name, name) if calls else [_into(call, name)]
            read = tuple(dict.fromkeys(name_read for *_, names in link for name_read in names))
            works = any(WORKSPACE in call.buffers for call in calls)
            self.buffers[name] = self.whole.buffers[result.name]
            self.early.append(
                _Operation(
                    node=replace(
                        node,
                        name=node.name if last else _of(node.name, link[0][1]),
                        inputs=(*read, before) if before else read,
                        outputs=(replace(result, name=name),),
                        flops=sum(_share(node.flops, t, len(parts)) for _, t, *_ in link),
                        bytes_moved=None,
                        workspace_bytes=result.bytes if works else 0,
                        in_place=((name, before),) if before else (),
                    ),
                    calls=tuple(calls),
                )
            )
            before = name

    def _adding(self, call: Call, whole: str, out: str) -> list[Call]:
        """Return calls that add a sum to what is there."""
        if call.kernel == "pm_mm":
            return [replace(_into(call, out), arguments=(Ref(out), *call.arguments[1:-1], 1))]
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
        return [_into(call, WORKSPACE), total]

    # -- order -------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[_Operation]:
        """Yield all nodes, each after what it reads, and before what it reads is replaced."""
        computed: set[str] = set()
        waiting = list(self.early)

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
            while (ready := next(filter(is_ready, waiting), None)) is not None:
                waiting.remove(ready)
                yield from with_inputs(ready)


def _renaming(loops: Loops | None, name: str, new: str) -> Loops | None:
    if loops is None:
        return None
    refs = (replace(ref, buffer=new) if ref.buffer == name else ref for ref in loops.refs)
    return replace(loops, refs=tuple(refs))


def _moved(loops: Loops | None, name: str, source: tuple[str, np.ndarray]) -> Loops | None:
    """Return loops that go through a piece where it lies; None where the kernel cannot do so."""
    for number, ref in enumerate(loops.refs if loops else ()):
        if loops is not None and ref.buffer == name:
            loops = loops.with_elements(number, source[0], source[1][loops.elements(number)])
    return None if loops is None or loops.as_call() is None else loops


def _of(name: str, t: int) -> str:
    return f"{name}[{t}]"


def _share(whole: int, number: int, count: int) -> int:
    return whole * (number + 1) // count - whole * number // count


def _into(call: Call, out: str) -> Call:
    return replace(call, arguments=(Ref(out), *call.arguments[1:]))


# -- products that are added -----------------------------------------------------------------------


def _added(step: LoweredStep) -> LoweredStep:
    """Let a product be summed in the memory of the gradient that it is added to.

    Both are gradients of one weight, such as of two time steps. The node comes where the product
    was: the other gradient is there.
    """
    graph = step.graph
    kept = step.returned_buffers
    nodes: list[tuple[Node, tuple[Call, ...]]] = []
    where: dict[str, int] = {}
    gone: set[str] = set()
    for k, (node, calls) in enumerate(zip(graph.nodes, step.calls, strict=True)):
        match calls:
            case (Call("pm_add", (Ref(out, 0), Ref(x, 0), Ref(y, 0), (1, n, 1, 1, 1), 1.0)),) if (
                x != y and x in where and y in where
            ):
                before, product = sorted((x, y), key=where.__getitem__)
            case _:
                before = product = out = ""
                n = 0
        maker, product_calls = nodes[where[product]] if product else (node, calls)
        if (
            product not in kept
            and product
            and graph.users_of[graph.tensor_index[product]] == (k,)
            and _is_weight_gradient(product_calls, product, n)
            and _is_gradient_sum(*nodes[where[before]])
        ):
            gone.add(product)
            where[out] = where[product]
            copy = Call("pm_copy", (Ref(out), Ref(before), (1, n, 1, 1)))
            adding = replace(
                product_calls[0], arguments=(Ref(out), *product_calls[0].arguments[1:-1], 1)
            )
            joined = replace(
                maker,
                name=node.name,
                inputs=(*maker.inputs, before),
                outputs=node.outputs,
                flops=maker.flops + node.flops,
                bytes_moved=None,
                in_place=((out, before),),
            )
            nodes[where[product]] = joined, (copy, adding)
        else:
            where.update((tensor.name, len(nodes)) for tensor in node.outputs)
            nodes.append((node, calls))
    if not gone:
        return step
    return step.with_nodes(
        (node for node, _ in nodes),
        (calls for _, calls in nodes),
        buffers={name: buffer for name, buffer in step.buffers.items() if name not in gone},
    )


def _is_weight_gradient(calls: Sequence[Call], name: str, elements: int) -> bool:
    """Return whether one product makes a gradient of a weight: it sums over rows of factors."""
    match calls:
        case (Call("pm_mm", (Ref(out, 0), _, _, int(m), _, int(n), int(row), 1, _, _, 1, 0)),):
            return out == name and row == n and m * n == elements
    return False


def _is_gradient_sum(node: Node, calls: Sequence[Call]) -> bool:
    """Return whether a node makes the gradient of a weight, or adds to it."""
    match calls:
        case (*_, Call("pm_mm", (_, _, _, _, _, _, _, 1, _, _, 1, _))):
            return node.phase == Phase.BACKWARD
    return False
