"""The minimum makespan of all programs with given moves, by enumeration, for small graphs."""

from dataclasses import dataclass
from typing import NamedTuple

from poetmodel.plan import Op
from poetmodel.planner.sequence import find_unread_page_ins


def find_min_makespan_s(homes, table, moves, ram_budget_bytes):
    """Return the minimum makespan [s] of a core and a DMA channel; None if no program fits.

    It tries every position of every transfer and every wait. `moves` are computations, in fixed
    order, and transfers, each of one copy of a tensor (see `extract_actions`). The work grows with
    the number of computations times ``2`` to the number of page-ins times ``3`` to that of
    page-outs. It shares only `moves` with the planner's search, so that each can test the other.
    Raises ValueError if a page-in has no reader.
    """
    if find_unread_page_ins(homes, moves):
        msg = "expected every page-in to have a reader"
        raise ValueError(msg)
    return _Programs(homes, table, moves, ram_budget_bytes).find_minimum()


@dataclass(slots=True, kw_only=True)
class _Event:
    """One transfer with its precedence constraints."""

    op: Op
    tensor: int
    after: int
    """Number of computations that must precede it."""
    before: int
    """The computation that must follow it."""
    last_read: int
    """The last computation that reads the copy; the one that made it if none does."""
    needs: int | None = None
    """The page-out whose end it must await."""


class _Progress(NamedTuple):
    """Executed moves: number of computations, and sets of transfers as bit masks."""

    computed: int
    begun: int
    """Mask of started transfers."""
    waited: int
    """Mask of page-outs whose end was awaited."""


class _Clock(NamedTuple):
    """Times at which core, bus and each started transfer end [s]; 0 for other transfers."""

    core: float
    bus: float
    ends: tuple[float, ...]


class _Programs:
    """A search over all programs: paths through states, with nondominated clocks of each state."""

    def __init__(self, homes, table, moves, budget):
        self.homes, self.table, self.budget = homes, table, budget
        self.nodes = [index for op, index in moves if op == Op.COMPUTE]
        self.events = []
        self.copies = []
        """Computed copies: tensor, maker, last reader, page-out."""
        self.arrivals = [[] for _ in self.nodes]
        """Page-ins that each computation reads from."""
        self.remade = [[] for _ in self.nodes]
        """Page-outs of older copies of the outputs of each computation."""
        self._parse_moves(moves)

    def _parse_moves(self, moves):
        """Fill `events`, `copies`, `arrivals` and `remade` from moves."""
        maker = {}
        reader = {}
        arrived = {}
        stored = {}
        position = 0
        for op, index in moves:
            if op == Op.COMPUTE:
                for i in self.homes.inputs[index]:
                    reader[i] = position
                    e = arrived[i]
                    if e is not None:
                        self.arrivals[position].append(e)
                        self.events[e].before = min(self.events[e].before, position)
                        self.events[e].last_read = position
                for i in self.homes.outputs[index]:
                    self._close(i, maker, reader, arrived, stored)
                    if i in stored:
                        self.remade[position].append(stored[i])
                    maker[i] = reader[i] = position
                    arrived[i] = None
                position += 1
            elif op == Op.PAGE_OUT:
                stored[index] = len(self.events)
                self.events.append(
                    _Event(op=op, tensor=index, after=maker[index] + 1, before=-1, last_read=-1)
                )
            else:
                self._close(index, maker, reader, arrived, stored)
                arrived[index] = len(self.events)
                self.events.append(
                    _Event(
                        op=op,
                        tensor=index,
                        after=reader.get(index, -1) + 1,
                        before=len(self.nodes),
                        last_read=-1,
                        needs=stored.get(index),
                    )
                )
        for i in maker:
            self._close(i, maker, reader, arrived, stored)

    def _close(self, i, maker, reader, arrived, stored):
        """Append the current copy of a tensor to `copies` if it was computed."""
        if i not in maker or arrived[i] is not None:
            return
        out = stored.get(i)
        if out is not None and self.events[out].after != maker[i] + 1:
            out = None
        if out is not None:
            self.events[out].last_read = reader[i]
        self.copies.append((i, maker[i], reader[i], out))

    def find_minimum(self):
        """Visit states by their number of executed moves; return the minimum makespan, or None."""
        start = _Progress(0, 0, 0)
        layer = {start: [_Clock(0.0, 0.0, (0.0,) * len(self.events))]}
        best = None
        while layer:
            next_layer = {}
            for state, clocks in layer.items():
                if state.computed == len(self.nodes) and state.begun + 1 == 1 << len(self.events):
                    ends = [max(clock.core, clock.bus) for clock in clocks]
                    best = min(ends) if best is None else min(best, *ends)
                for after, step in self._steps(state):
                    group = next_layer.setdefault(after, [])
                    for clock in clocks:
                        _keep(group, self._clock(clock, after, step))
            layer = next_layer
        return best

    def _steps(self, state):
        """Yield each possible next state, and the index of its event, or -1 for a computation."""
        computed, begun, waited = state
        ram = self._ram(state)
        if computed < len(self.nodes):
            need = ram + self.homes.step_bytes[self.nodes[computed]] - self._shared_bytes(state)
            ready = all(begun >> e & 1 for e in self.arrivals[computed])
            awaited = all(waited >> x & 1 for x in self.remade[computed])
            if ready and awaited and need <= self.budget:
                yield _Progress(computed + 1, begun, waited), -1
        for e, event in enumerate(self.events):
            if not begun >> e & 1:
                if computed < event.after:
                    continue
                if event.op == Op.PAGE_IN:
                    if ram + self.homes.sizes[event.tensor] > self.budget:
                        continue
                    if event.needs is not None and not waited >> event.needs & 1:
                        continue
                yield _Progress(computed, begun | 1 << e, waited), e
            elif event.op == Op.PAGE_OUT and not waited >> e & 1 and computed >= event.last_read:
                yield _Progress(computed, begun, waited | 1 << e), e

    def _clock(self, clock, after, step):
        core, bus, ends = clock
        if step < 0:
            position = after.computed - 1
            core = max([core, *(ends[e] for e in self.arrivals[position])])
            return _Clock(core + self.table.compute_time_s[self.nodes[position]], bus, ends)
        if after.waited >> step & 1:
            return _Clock(max(core, ends[step]), bus, ends)
        event = self.events[step]
        out = event.op == Op.PAGE_OUT
        times = self.table.page_out_time_s if out else self.table.page_in_time_s
        bus = max(core, bus) + times[event.tensor]
        return _Clock(core, bus, (*ends[:step], bus, *ends[step + 1 :]))

    def _shared_bytes(self, state):
        """Return the bytes of inputs that the next computation overwrites in place."""
        position = state.computed
        dying = {e.tensor for e in self.events if e.op == Op.PAGE_IN and e.last_read == position}
        for tensor, _, reader, out in self.copies:
            if reader == position and (out is None or state.waited >> out & 1):
                dying.add(tensor)
        return sum(self.homes.overwritten_bytes(self.nodes[position], dying).values())

    def _ram(self, state):
        """Return the bytes of the copies in RAM."""
        computed, begun, waited = state
        sizes = self.homes.sizes
        ram = self.homes.ram_bytes
        for tensor, maker, reader, out in self.copies:
            if maker < computed and (
                computed <= reader or (out is not None and not waited >> out & 1)
            ):
                ram += sizes[tensor]
        for e, event in enumerate(self.events):
            if event.op == Op.PAGE_IN and begun >> e & 1 and computed <= event.last_read:
                ram += sizes[event.tensor]
        return ram


def _keep(group, clock):
    """Add a clock unless another dominates it; remove the clocks that it dominates."""
    if any(_is_no_later(other, clock) for other in group):
        return
    group[:] = [other for other in group if not _is_no_later(clock, other)]
    group.append(clock)


def _is_no_later(a, b):
    if a.core > b.core or a.bus > b.bus:
        return False
    # A transfer that ended before the core's time counts as none.
    return all(x <= y or x <= b.core for x, y in zip(a.ends, b.ends, strict=True))
