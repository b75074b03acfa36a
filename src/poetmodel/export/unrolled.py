"""Products over all time steps of an unrolled network, as products of one time step each.

PyTorch stacks what the steps of a recurrent layer made, so that one product makes the gradient of a
weight: all pieces and the stack are in RAM at once then. Here each piece goes into the sum as soon
as it is there. Numbers are summed in another order; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from poetmodel.export.fusing import fused, parted
from poetmodel.export.kernels import parameter_names
from poetmodel.export.step import WORKSPACE, Buffer, Call, DataType, LoweredStep, Ref
from poetmodel.graph import Node, Phase, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from poetmodel.export.step import Argument

    Numbers: TypeAlias = tuple[int, ...]

_RANK: Final = 6
"""Dimensions that a shape table may have: ``PM_RANK``."""


def unrolled(step: LoweredStep) -> LoweredStep:
    """Return a step without the stacks of time steps over which gradients of weights are summed.

    What is computed for all time steps at once is computed for each of them, where that is read by
    time steps too: gates from inputs, and gradients of inputs. A product that is added to the
    gradient of a shared weight is summed in its memory.
    """
    found = parted(step)
    cut = _Cut(found)
    if cut.pieces:
        found = _Rewriting(cut).step()
    added = _added(found)
    return step if added is step or not cut.pieces and added is found else fused(added)


# -- calls as loops --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loops:
    """A call whose tensors are gone through by loops: in each dimension by steps [elements]."""

    call: Call
    sizes: Numbers
    refs: tuple[Ref, ...]
    steps: tuple[Numbers, ...]
    """Of each tensor, in each dimension."""

    def elements(self, number: int) -> np.ndarray:
        """Return which elements of a tensor each pass reads or writes."""
        found = np.array(self.refs[number].offset)
        for size, step in zip(self.sizes, self.steps[number], strict=True):
            found = found[..., None] + step * np.arange(size if step else 1)
        return found

    def part(self, dimension: int, first: int, count: int, stride: int) -> _Loops:
        """Return some of the passes of a dimension."""
        sizes = (*self.sizes[:dimension], count, *self.sizes[dimension + 1 :])
        refs = tuple(
            replace(ref, offset=ref.offset + first * steps[dimension])
            for ref, steps in zip(self.refs, self.steps, strict=True)
        )
        steps = tuple(
            (*each[:dimension], each[dimension] * stride, *each[dimension + 1 :])
            for each in self.steps
        )
        return replace(self, sizes=sizes, refs=refs, steps=steps)

    def as_call(self) -> Call | None:
        """Return the call; None where the kernel cannot go so."""
        return _FORMS[_form(self.call)][1](self)


def _loops(call: Call) -> _Loops | None:
    """Return a call as loops; None of a kernel that is none of these."""
    form = _form(call)
    return _FORMS[form][0](call) if form in _FORMS and call.where is None else None


def _form(call: Call) -> str:
    if call.kernel in _FORMS:
        return call.kernel
    refs = [a for a in call.arguments if isinstance(a, Ref)]
    names, rest = parameter_names(call.kernel), call.arguments[len(refs) + 1 :]
    table = call.arguments[len(refs)] if len(call.arguments) > len(refs) else None
    if names[len(refs) : len(refs) + 1] != ("shape",) or not isinstance(table, tuple):
        return ""
    fits = 1 <= table[0] <= _RANK and len(table) == 1 + table[0] * (1 + len(refs))
    return "each" if fits and all(isinstance(a, float) for a in rest) else ""


def _ints(arguments: Iterable[Argument]) -> list[int]:
    return [a for a in arguments if isinstance(a, int)]


def _refs(call: Call) -> tuple[Ref, ...]:
    return tuple(a for a in call.arguments if isinstance(a, Ref))


def _columns(table: Argument) -> list[Numbers]:
    """Return sizes, then the steps of each tensor, of a shape table: see ``pm_each.h``."""
    if not isinstance(table, tuple):
        raise TypeError(table)
    rank, *rest = table
    width = len(rest) // rank
    return [tuple(rest[k::width]) for k in range(width)]


def _table(columns: Sequence[Numbers]) -> Numbers | None:
    """Return a shape table, without dimensions of size 1; None where it has too many."""
    rows = [row for row in zip(*columns, strict=True) if row[0] != 1]
    merged: list[list[int]] = []
    for size, *steps in rows:
        if merged and steps == [merged[-1][0] * step for step in merged[-1][1:]]:
            merged[-1][0] *= size
        else:
            merged.append([size, *steps])
    merged = merged or [[1] * len(columns)]
    return (len(merged), *(n for row in merged for n in row)) if len(merged) <= _RANK else None


def _read_each(call: Call) -> _Loops:
    refs = _refs(call)
    sizes, *steps = _columns(call.arguments[len(refs)])
    return _Loops(call=call, sizes=sizes, refs=refs, steps=tuple(steps))


def _write_each(loops: _Loops) -> Call | None:
    table, count = _table((loops.sizes, *loops.steps)), len(loops.refs)
    rest = loops.call.arguments[count + 1 :]
    return table and replace(loops.call, arguments=(*loops.refs, table, *rest))


def _read_product(call: Call) -> _Loops:
    m, k, n, out_row, a_row, a_column, b_row, b_column, _ = _ints(call.arguments)
    steps = (out_row, 0, 1), (a_row, a_column, 0), (0, b_row, b_column)
    return _Loops(call=call, sizes=(m, k, n), refs=_refs(call), steps=steps)


def _write_product(loops: _Loops) -> Call | None:
    (out_row, _, column), (a_row, a_column, _), (_, b_row, b_column) = loops.steps
    numbers = (*loops.sizes, out_row, a_row, a_column, b_row, b_column)
    fits = column == 1 or loops.sizes[2] == 1
    last = loops.call.arguments[-1]
    return replace(loops.call, arguments=(*loops.refs, *numbers, last)) if fits else None


def _read_sum(call: Call) -> _Loops:
    sizes, out, x = _columns(call.arguments[2])
    summed, inside = _columns(call.arguments[3])
    steps = (*out, *(0 for _ in summed)), (*x, *inside)
    return _Loops(call=call, sizes=(*sizes, *summed), refs=_refs(call), steps=steps)


def _write_sum(loops: _Loops) -> Call | None:
    rank = len(_columns(loops.call.arguments[2])[0])
    out, x = loops.steps
    outer = _table((loops.sizes[:rank], out[:rank], x[:rank]))
    inner = _table((loops.sizes[rank:], x[rank:]))
    rest = loops.call.arguments[4:]
    return outer and inner and replace(loops.call, arguments=(*loops.refs, outer, inner, *rest))


def _read_fill(call: Call) -> _Loops:
    return _Loops(call=call, sizes=(_ints(call.arguments)[0],), refs=_refs(call), steps=((1,),))


def _write_fill(loops: _Loops) -> Call | None:
    fits = loops.steps == ((1,),)
    arguments = (*loops.refs, *loops.sizes, *loops.call.arguments[2:])
    return replace(loops.call, arguments=arguments) if fits else None


def _read_rows(call: Call) -> _Loops:
    m, n, row, step = _ints(call.arguments)
    return _Loops(call=call, sizes=(m, n), refs=_refs(call), steps=((row, 1), (0, step)))


def _write_rows(loops: _Loops) -> Call | None:
    (row, column), (_, step) = loops.steps
    fits = column == 1 or loops.sizes[1] == 1
    return replace(loops.call, arguments=(*loops.refs, *loops.sizes, row, step)) if fits else None


_FORMS: Final = {
    "each": (_read_each, _write_each),
    "pm_mm": (_read_product, _write_product),
    "pm_sum": (_read_sum, _write_sum),
    "pm_fill": (_read_fill, _write_fill),
    "pm_fill_rows": (_read_rows, _write_rows),
}
"""What reads and writes the loops of kernels; ``each`` stands for those with one shape table."""


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

    def touched(self, loops: _Loops, number: int) -> tuple[int, _Loops] | None:
        """Return the only piece that loops touch of a tensor, and the loops over that piece."""
        found = loops.elements(number)
        rows = found // self.inner
        piece = int(rows.flat[0]) % self.count
        if (rows % self.count != piece).any():
            return None
        inside = rows // self.count * self.inner + found % self.inner
        first, steps = int(inside.flat[0]), []
        for dimension, step in enumerate(loops.steps[number]):
            line = np.moveaxis(inside, dimension, 0).reshape(inside.shape[dimension], -1)[:, 0]
            steps.append(int(line[1] - line[0]) if len(line) > 1 else step)
        ref = replace(loops.refs[number], offset=first)
        refs = (*loops.refs[:number], ref, *loops.refs[number + 1 :])
        every = (*loops.steps[:number], tuple(steps), *loops.steps[number + 1 :])
        moved = replace(loops, refs=refs, steps=every)
        return (piece, moved) if (moved.elements(number) == inside).all() else None

    def parts(self, loops: _Loops, number: int) -> Iterator[tuple[int, list[_Loops]]]:
        """Yield each dimension by which loops over a tensor can go piece by piece, with these."""
        for d, (size, step) in enumerate(zip(loops.sizes, loops.steps[number], strict=True)):
            if step == self.inner and size == self.count:
                yield d, [loops.part(d, t, 1, 1) for t in range(self.count)]
            elif step == self.inner and size == self.count * self.outer:
                yield d, [loops.part(d, t, self.outer, self.count) for t in range(self.count)]
            elif step > 0 and self.outer == 1 and step * size == self.count * self.inner:
                rows, rest = divmod(self.inner, step)
                if not rest:
                    yield d, [loops.part(d, t * rows, rows, 1) for t in range(self.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A call, or one of the calls that it becomes, and which pieces that touches."""

    call: Call
    loops: _Loops
    of: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What becomes of a call: one part, or one for each piece."""

    parts: tuple[_Part, ...]
    is_sum: bool = False
    """Whether its parts are summed, in one result."""


def _inside(loops: _Loops, pieces: Mapping[str, _Pieces]) -> _Part | None:
    """Return a call that touches one piece of each tensor that is cut."""
    of: dict[str, int] = {}
    for number, ref in enumerate(loops.refs):
        if ref.buffer in pieces:
            found = pieces[ref.buffer].touched(loops, number)
            if found is None or of.setdefault(ref.buffer, found[0]) != found[0]:
                return None
            loops = found[1]
    call = loops.as_call()
    return None if call is None else _Part(call=call, loops=loops, of=of)


def _parts(call: Call, pieces: Mapping[str, _Pieces]) -> _Parts | None:
    """Return what a call becomes where tensors are cut; None where it cannot be cut so."""
    if not pieces.keys() & set(call.buffers):
        return _Parts(parts=(_Part(call=call, loops=_NOWHERE, of={}),))
    loops = _loops(call)
    if loops is None:
        return None
    whole = _inside(loops, pieces)
    if whole is not None:
        return _Parts(parts=(whole,))
    for number, ref in enumerate(loops.refs):
        for d, parts in pieces[ref.buffer].parts(loops, number) if ref.buffer in pieces else ():
            found = [part for each in parts if (part := _inside(each, pieces)) is not None]
            if len(found) == len(parts):
                return _Parts(parts=tuple(found), is_sum=loops.steps[0][d] == 0)
    return None


_NOWHERE: Final = _Loops(call=Call("", ()), sizes=(), refs=(), steps=())


class _Cut:
    """Which tensors of a step are cut into pieces, and what becomes of the nodes around them."""

    def __init__(self, step: LoweredStep) -> None:
        self.step = step
        self.graph = step.graph
        self._kept = {step.loss.buffer, *(r.buffer for v in step.gradients for r in v.pieces)}
        self._around: dict[str, list[int]] = {}
        for k, calls in enumerate(step.calls):
            for name in dict.fromkeys(name for call in calls for name in call.buffers):
                self._around.setdefault(name, []).append(k)
        self.pieces: dict[str, _Pieces] = {}
        self.whole: set[str] = set()
        """Tensors in pieces that are also there as a whole: stacks that some nodes cannot cut."""
        self.parts: dict[int, list[_Parts]] = {}
        """For each node that touches a tensor in pieces its calls."""
        self.made: dict[int, list[_Parts]] = {}
        """For each node whose result is in pieces its calls."""
        self._propose()
        while self.pieces and not self._settle():
            pass

    def is_copy(self, k: int) -> bool:
        """Return whether a node only copies, so that its pieces are there anyway."""
        return all(call.kernel == "pm_copy" for call in self.step.calls[k])

    # -- which tensors ---------------------------------------------------------------------------

    def _may_cut(self, name: str) -> bool:
        i = self.graph.tensor_index.get(name)
        if i is None or name in self._kept:
            return False
        node = self.graph.nodes[self.graph.node_of[i]]
        plain = node.recomputable and not node.workspace_bytes and len(node.outputs) == 1
        return plain and not node.is_state and self.step.buffers[name].type is DataType.REAL

    def _propose(self) -> None:
        """Cut the stacks over which weights' gradients are summed, and what goes along with them."""
        for k in range(len(self.graph.nodes)):
            name, pieces = self._stack(k)
            if pieces is not None and self._is_summed(name, pieces):
                self._propose_around(name, pieces)
        counts = {pieces.count for pieces in self.pieces.values()}
        for tensor in self.graph.tensors if counts else ():
            if tensor.name not in self.pieces and self._may_cut(tensor.name):
                for pieces in self._sliced(tensor.name, counts):
                    self._propose_around(tensor.name, pieces)

    def _stack(self, k: int) -> tuple[str, _Pieces | None]:
        """Return the result of a node that copies pieces of one size, one after the other."""
        node, calls = self.graph.nodes[k], self.step.calls[k]
        if len(calls) < 2 or len(node.outputs) != 1 or not self.is_copy(k):
            return "", None
        name = node.outputs[0].name
        inner, rest = divmod(self.step.buffers[name].elements, len(calls))
        pieces = _Pieces(1, len(calls), inner)
        if rest or not inner or not self._may_cut(name):
            return "", None
        found = [_parts(call, {name: pieces}) for call in calls]
        order = [each.parts[0].of.get(name) if each else None for each in found]
        return name, pieces if order == list(range(len(calls))) else None

    def _is_summed(self, name: str, pieces: _Pieces) -> bool:
        """Return whether pieces are summed up: by themselves, or times another activation."""
        for k in self._around[name]:
            for call in self.step.calls[k] if len(self.step.calls[k]) == 1 else ():
                found = _parts(call, {name: pieces})
                others = {ref.buffer for ref in _refs(call)[1:]} - {name}
                state = {self.graph.tensors[i].name for i in self.graph.state_tensors}
                if found and found.is_sum and call.kernel in _SUMS and not others & state:
                    return True
        return False

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
                loops = _loops(call) if name in call.buffers else None
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

    # -- what becomes of nodes -----------------------------------------------------------------------

    def _settle(self) -> bool:
        """State what becomes of each node; leave tensors whole where that cannot be."""
        self.whole, self.parts, self.made = set(), {}, {}
        used: set[str] = set()
        around = sorted({k for name in self.pieces for k in self._around[name]})
        for k in reversed(around):
            outputs = [t.name for t in self.graph.nodes[k].outputs if t.name in self.pieces]
            if outputs:
                made = self._calls(k, self.pieces)
                if made is None or not _covers(made, outputs[0], self.pieces[outputs[0]]):
                    return self._leave(outputs)
                self.made[k] = made
                used |= _read(made, outputs[0])
                if outputs[0] not in self.whole:
                    continue
            read = {n: p for n, p in self.pieces.items() if n not in outputs}
            for pieces in (read, {n: p for n, p in read.items() if not self._is_there(n)}):
                parts = self._calls(k, pieces)
                if parts is not None and self._may_be(k, parts):
                    break
            else:
                return self._leave(self._touched(k, read))
            self.parts[k] = parts
            self.whole |= set(self._touched(k, read)) - set(pieces)
            used |= _read(parts, "")
        unread = [name for name in self.pieces if name not in used]
        return not unread or self._leave(unread)

    def _leave(self, names: Iterable[str]) -> bool:
        for name in names:
            del self.pieces[name]
        return False

    def _touched(self, k: int, pieces: Mapping[str, _Pieces]) -> list[str]:
        named = {name for call in self.step.calls[k] for name in call.buffers}
        return [name for name in pieces if name in named]

    def _is_there(self, name: str) -> bool:
        return self.is_copy(self._maker(name))

    def _calls(self, k: int, pieces: Mapping[str, _Pieces]) -> list[_Parts] | None:
        found = [_parts(call, pieces) for call in self.step.calls[k]]
        return [each for each in found if each is not None] if None not in found else None

    def _may_be(self, k: int, parts: list[_Parts]) -> bool:
        """Return whether a node whose result is whole can go so.

        It takes one piece of each tensor, or sums pieces up. Where it puts pieces side by side it
        reads all at once, which is for those that are there anyway.
        """
        cut = [each for each in parts if len(each.parts) > 1]
        if not cut:
            return True
        node, summed = self.graph.nodes[k], any(each.is_sum for each in cut)
        if len(node.outputs) != 1 or node.workspace_bytes or not node.recomputable:
            return False
        if summed:
            return len(parts) == 1 and _is_plain_sum(self.step.calls[k][0])
        return all(map(self._is_there, {name for each in cut for name in _read([each], "")}))


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
    loops = _loops(call)
    if loops is None or name not in call.buffers or _inside(loops, {name: pieces}) is not None:
        return
    for number, ref in enumerate(loops.refs):
        for d, parts in pieces.parts(loops, number) if ref.buffer == name else ():
            if not all(_inside(part, {name: pieces}) for part in (parts[0], parts[-1])):
                continue
            for other, steps in zip(loops.refs, loops.steps, strict=True):
                lengths = parts[0].sizes[d] if parts[1].refs != parts[0].refs else 1
                between = _between(parts, other.buffer)
                if other.buffer != name and between > 0 and lengths and steps[d]:
                    outer, rest = divmod(buffers[other.buffer].elements, between * pieces.count)
                    if not rest and outer:
                        yield other.buffer, _Pieces(outer, pieces.count, between)
            return


def _between(parts: Sequence[_Loops], name: str) -> int:
    """Return how far apart two parts begin in a tensor [elements]."""
    first, second = (
        next(ref.offset for ref in part.refs if ref.buffer == name) for part in parts[:2]
    )
    return second - first


def _covers(made: Sequence[_Parts], name: str, pieces: _Pieces) -> bool:
    """Return whether calls write each piece of a tensor, and sum nothing up in one."""
    written = [part.of.get(name) for each in made for part in each.parts]
    alone = all(
        len({part.of.get(name) for part in each.parts}) == len(each.parts) for each in made
    )
    return alone and set(written) == set(range(pieces.count))


def _read(parts: Iterable[_Parts], made: str) -> set[str]:
    return {name for each in parts for part in each.parts for name in part.of} - {made}


# -- the step in pieces ----------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _New:
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
        self.lies: dict[str, Ref] = {}
        """Pieces that are there already: where."""
        self.soon: list[_New] = []
        """Nodes that come as soon as what they read is there, in this order."""
        self.late: dict[str, _New] = {}
        """By their results: nodes that come before the first one that reads them."""
        self.others: dict[int, _New] = {}
        """The nodes that stay where they were."""
        self.ready: dict[str, int] = {}
        """For each tensor after which old node it can be there."""

    def step(self) -> LoweredStep:
        """Return the new step."""
        for k, node in enumerate(self.graph.nodes):
            if k in self.cut.made:
                self._make_pieces(k)
            self.ready.update((tensor.name, k) for tensor in node.outputs)
            if k in self.cut.parts:
                self._take_pieces(k)
            elif k not in self.cut.made:
                self.others[k] = _New(node=node, calls=self.whole.calls[k])
        nodes = list(self._in_order())
        return replace(
            self.whole,
            graph=replace(self.graph, nodes=tuple(new.node for new in nodes)),
            calls=tuple(new.calls for new in nodes),
            buffers=self.buffers,
        )

    def _make_pieces(self, k: int) -> None:
        """Add a node for each piece of a result, but for those that are there already."""
        node, (result,) = self.graph.nodes[k], self.graph.nodes[k].outputs
        pieces = self.cut.pieces[result.name]
        parts = [part for each in self.cut.made[k] for part in each.parts]
        buffer = Buffer(elements=pieces.elements, type=self.whole.buffers[result.name].type)
        for t in range(pieces.count):
            mine, name = [part for part in parts if part.of[result.name] == t], _of(result.name, t)
            there = self._there(mine, pieces)
            if there is not None:
                self.lies[name] = there
                self.ready[name] = self.ready.get(there.buffer, -1)
                continue
            calls, read = self._renamed(mine)
            read.pop(name)
            self.buffers[name] = buffer
            self.ready[name] = max((self.ready.get(each, -1) for each in read), default=-1)
            new = _New(
                node=replace(
                    node,
                    name=_of(node.name, t),
                    inputs=tuple(each for each in read if each in self.ready),
                    outputs=(Tensor(name=name, bytes=buffer.bytes),),
                    flops=_share(node.flops, t, pieces.count),
                    bytes_moved=None,
                    in_place=self._in_place(name, calls),
                ),
                calls=calls,
            )
            cuts = any(len(part.of) > 1 for part in mine)
            if node.phase == Phase.BACKWARD and cuts:
                self.soon.append(new)
            else:
                self.late[name] = new

    def _there(self, parts: Sequence[_Part], pieces: _Pieces) -> Ref | None:
        """Return where a piece lies already, if all that makes it is a copy of that."""
        if len(parts) != 1 or parts[0].call.kernel != "pm_copy":
            return None
        _, x = self._renamed(parts)[0][0].arguments[:2]
        loops = parts[0].loops
        lies = zip(loops.sizes, *loops.steps, strict=True)
        alike = all(size == 1 or to == of for size, to, of in lies) and loops.refs[0].offset == 0
        if not isinstance(x, Ref) or not alike or prod(loops.sizes) != pieces.elements:
            return None
        i = self.graph.tensor_index.get(x.buffer)
        if i is not None and self.graph.nodes[self.graph.node_of[i]].is_state:
            return None
        mine = self.buffers[x.buffer].elements == pieces.elements
        return x if x.buffer not in self.ready or mine else None

    def _renamed(self, parts: Sequence[_Part]) -> tuple[tuple[Call, ...], dict[str, None]]:
        """Return the calls of parts, with pieces by their names, and what they touch."""
        calls = []
        for part in parts:
            arguments = tuple(
                self._ref(a, part.of[a.buffer]) if isinstance(a, Ref) and a.buffer in part.of else a
                for a in part.call.arguments
            )
            calls.append(replace(part.call, arguments=arguments))
        return tuple(calls), dict.fromkeys(name for call in calls for name in call.buffers)

    def _ref(self, ref: Ref, t: int) -> Ref:
        name = _of(ref.buffer, t)
        there = self.lies.get(name, Ref(name))
        return replace(there, offset=there.offset + ref.offset)

    def _in_place(self, out: str, calls: Sequence[Call]) -> tuple[tuple[str, str], ...]:
        """Return which input a result may take over: one that its only call goes through alike."""
        loops = _loops(calls[0]) if len(calls) == 1 and _form(calls[0]) == "each" else None
        if loops is None or loops.refs[0] != Ref(out):
            return ()
        for ref, steps in zip(loops.refs[1:], loops.steps[1:], strict=True):
            others = [s for r, s in zip(loops.refs, loops.steps, strict=True) if r.buffer == ref.buffer]
            i = self.graph.tensor_index.get(ref.buffer)
            state = i is not None and self.graph.nodes[self.graph.node_of[i]].is_state
            if (
                steps == loops.steps[0]
                and ref.offset == 0
                and others == [steps]
                and ref.buffer in self.ready
                and not state
                and self.buffers[ref.buffer] == self.buffers[out]
            ):
                return ((out, ref.buffer),)
        return ()

    def _take_pieces(self, k: int) -> None:
        """Add a node that reads pieces, or a chain of nodes that sum them up."""
        node, parts = self.graph.nodes[k], self.cut.parts[k]
        if any(len(each.parts) > 1 and each.is_sum for each in parts):
            self._sum_up(k, parts[0].parts)
            return
        calls, touched = self._renamed([part for each in parts for part in each.parts])
        made = {tensor.name for tensor in node.outputs}
        pairs = tuple(pair for pair in node.in_place if pair[1] in touched)
        if not pairs and len(made) == 1:
            pairs = self._in_place(node.outputs[0].name, calls)
        inputs = tuple(n for n in touched if n in self.ready and n not in made)
        updated = tuple(n for n in node.inputs if n in made or n in self.ready and n in touched)
        self.others[k] = _New(
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
        found = []
        for number, part in enumerate(parts):
            (call,), touched = self._renamed([part])
            touched.pop(result.name)
            read = tuple(name for name in touched if name in self.ready)
            found.append((max(self.ready[name] for name in read), number, call, read))
        before, links = "", [list(group) for _, group in groupby(sorted(found), lambda f: f[0])]
        for link in links:
            last = link is links[-1]
            name = result.name if last else _of(result.name, link[0][1])
            calls: list[Call] = []
            if before:
                count = self.whole.buffers[result.name].elements
                calls.append(Call("pm_copy", (Ref(name), Ref(before), (1, count, 1, 1))))
            for _, _, call, _ in link:
                calls += self._adding(call, result.name, name) if calls else [_into(call, name)]
            read = tuple(dict.fromkeys(each for *_, names in link for each in names))
            works = any(WORKSPACE in call.buffers for call in calls)
            self.buffers[name] = self.whole.buffers[result.name]
            self.soon.append(
                _New(
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
        loops = _loops(call)
        if loops is None:
            raise TypeError(call)
        count = self.whole.buffers[whole].elements
        rank = call.arguments[2][0] if isinstance(call.arguments[2], tuple) else 0
        if prod(loops.sizes[rank:]) == 1 and call.arguments[4] == 1.0:
            table = _table((loops.sizes, loops.steps[0], loops.steps[0], loops.steps[1]))
            if table is not None:
                return [Call("pm_add", (Ref(out), Ref(out), loops.refs[1], table, 1.0))]
        total = Call("pm_add", (Ref(out), Ref(out), Ref(WORKSPACE), (1, count, 1, 1, 1), 1.0))
        return [_into(call, WORKSPACE), total]

    # -- order -------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[_New]:
        """Yield all nodes, each after what it reads, and before what it reads is replaced."""
        there: set[str] = set()
        soon = list(self.soon)

        def is_ready(new: _New) -> bool:
            return all(name in there or name in self.late for name in new.node.inputs)

        def with_inputs(new: _New) -> Iterator[_New]:
            for name in new.node.inputs:
                if name in self.late:
                    yield from with_inputs(self.late.pop(name))
            there.update(tensor.name for tensor in new.node.outputs)
            yield new

        for k in sorted(self.others):
            new = self.others[k]
            replaced = {tensor.replaces for tensor in new.node.outputs}
            for name in [n for n, late in self.late.items() if replaced & set(late.node.inputs)]:
                if name in self.late:
                    yield from with_inputs(self.late.pop(name))
            yield from with_inputs(new)
            while (now := next(filter(is_ready, soon), None)) is not None:
                soon.remove(now)
                yield from with_inputs(now)


def _of(name: str, t: int) -> str:
    return f"{name}[{t}]"


def _share(whole: int, number: int, count: int) -> int:
    return whole * (number + 1) // count - whole * number // count


def _into(call: Call, out: str) -> Call:
    return replace(call, arguments=(Ref(out), *call.arguments[1:]))


# -- products that are added -----------------------------------------------------------------------


def _added(step: LoweredStep) -> LoweredStep:
    """Let a product be summed in the memory of the gradient that it is added to.

    Both are gradients of one weight, such as of two time steps.
    """
    graph = step.graph
    kept = {step.loss.buffer, *(ref.buffer for v in step.gradients for ref in v.pieces)}
    nodes: list[tuple[Node, tuple[Call, ...]] | None] = []
    gone: set[str] = set()
    where: dict[str, int] = {}
    for k, pair in enumerate(zip(graph.nodes, step.calls, strict=True)):
        node, calls = pair
        new: tuple[Node, tuple[Call, ...]] = pair
        match calls:
            case (Call("pm_add", (Ref(out, 0), Ref(x, 0), Ref(y, 0), (1, n, 1, 1, 1), 1.0)),):
                operands = [name for name in (x, y) if name in where]
                latest = max(operands, key=where.__getitem__, default="")
                made = nodes[where[latest]] if latest else None
            case _:
                made, latest, n, x, y, out = None, "", 0, "", "", ""
        other = y if latest == x else x
        if (
            made is not None
            and x != y
            and latest not in kept
            and len(operands) == 2
            and graph.users_of[graph.tensor_index[latest]] == (k,)
            and _is_weight_gradient(made[1], latest, n)
            and _is_gradient_sum(nodes[where[other]])
        ):
            nodes[where[latest]] = None
            gone.add(latest)
            product = made[1][0]
            copy = Call("pm_copy", (Ref(out), Ref(other), (1, n, 1, 1)))
            adding = replace(product, arguments=(Ref(out), *product.arguments[1:-1], 1))
            new = (
                replace(
                    made[0],
                    name=node.name,
                    inputs=(*made[0].inputs, other),
                    outputs=node.outputs,
                    flops=made[0].flops + node.flops,
                    bytes_moved=None,
                    in_place=((out, other),),
                ),
                (copy, adding),
            )
            # It comes where the product was: the other gradient is there.
            nodes[where[latest]] = new
            where[out] = where[latest]
            continue
        where.update((tensor.name, len(nodes)) for tensor in node.outputs)
        nodes.append(new)
    if not gone:
        return step
    kept_nodes = [pair for pair in nodes if pair is not None]
    return replace(
        step,
        graph=replace(graph, nodes=tuple(node for node, _ in kept_nodes)),
        calls=tuple(calls for _, calls in kept_nodes),
        buffers={name: buffer for name, buffer in step.buffers.items() if name not in gone},
    )


def _is_weight_gradient(calls: Sequence[Call], name: str, elements: int) -> bool:
    """Return whether one product makes a gradient of a weight: it sums over rows of both factors."""
    match calls:
        case (Call("pm_mm", (Ref(out, 0), _, _, int(m), _, int(n), int(row), 1, _, _, 1, 0)),):
            return out == name and row == n and m * n == elements
    return False


def _is_gradient_sum(made: tuple[Node, tuple[Call, ...]] | None) -> bool:
    """Return whether a node makes the gradient of a weight, or adds to it."""
    if made is None or made[0].phase != Phase.BACKWARD:
        return False
    *_, last = made[1]
    return last.kernel == "pm_mm" and last.arguments[7] == last.arguments[10] == 1
