"""Search for the transfers' places with the least makespan, gap by gap."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.plan import Instruction, Op
from poetmodel.problem import RELATIVE_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.planner.timeline import Timeline

ROUNDS: Final = ((3, 1), (12, 1), (32, 1), (24, 2), (64, 4), (256, 4), (1024, 4))
"""The rounds of a search: labels kept per gap, and transfers of a kind that may begin next."""
WORK: Final = 6_000
"""Labels that the rounds after the first may make together, about."""
_PER_GAP: Final = 6
"""Continuations of one label, for each transfer that may begin next."""
_LOOKED: Final = 8
"""Page-ins that are tried for room at a gap."""
_AHEAD: Final = 24
"""Transfers that an estimate looks at."""


class _Trail(NamedTuple):
    """Transfers begun, the last first."""

    before: _Trail | None
    gap: int
    number: int
    transfer: Instruction


class _Label(NamedTuple):
    """What happened up to a gap."""

    core: float
    """When the core comes to the gap [s]."""
    bus: float
    """When the bus is free [s]."""
    ins: int
    """Page-ins begun, one bit each."""
    outs: int
    """Page-outs begun, one bit each."""
    ahead: tuple[tuple[int, float], ...]
    """Page-ins begun whose reader is still to come, with their ends, by number."""
    going: tuple[tuple[int, float], ...]
    """Page-outs not waited for, with their ends, in bus order."""
    trail: _Trail | None
    """Transfers begun."""
    begun: float = 0.0
    """Bus time of the transfers begun [s]."""


class Found(NamedTuple):
    """The best that a search found."""

    makespan_s: float
    """When core and bus are done [s]."""
    transfers: tuple[tuple[int, Instruction], ...]
    """Transfers with their gaps, in bus order."""
    complete: bool
    """Whether no label was left out."""


def best_transfers(timeline: Timeline, *, work: int = WORK) -> Found:
    """Choose where the transfers of a timeline begin.

    Parameters
    ----------
    timeline : Timeline
        Computations, and windows of the transfers.
    work : int
        Labels that may be made after the first round; more is slower and seldom better.

    Returns
    -------
    Found
        The least makespan found; on small timelines nearly always the least there is.

    Notes
    -----
    A label is a choice of transfers up to a gap. From gap to gap every label is continued in every
    way that can pay: a transfer begins only if the bus would otherwise idle before the next gap,
    since beginning later costs nothing else. Of labels with the same transfers begun, those behind
    in nothing stay; of the rest, the first few by the least estimate. If that left any out, the
    next round keeps more, as long as `work` is likely to last.
    """
    search = _Search(timeline)
    bound = max(timeline.rest_s[0], search.jobs.before_s[-1]) * (1 + RELATIVE_TOLERANCE)
    best = search.run(*ROUNDS[0])
    spent = search.made / ROUNDS[0][0]
    for width, choices in ROUNDS[1:]:
        if best.complete or best.makespan_s <= bound:
            break
        if spent * width > work:
            continue
        found = search.run(width, choices)
        work -= search.made
        spent = search.made / width
        if found.complete or found.makespan_s < best.makespan_s:
            best = found
    return best


class _Search:
    """The rounds of one search."""

    def __init__(self, timeline: Timeline) -> None:
        self.line = timeline
        gaps = len(timeline.nodes) + 1
        self.due_in = [0] * gaps
        self.open_in = _windows(gaps, ((x.first, x.last) for x in timeline.page_ins))
        for e, into in enumerate(timeline.page_ins):
            self.due_in[into.last] |= 1 << e
        self.due_out = [0] * gaps
        for x, out in enumerate(timeline.page_outs):
            self.due_out[out.last] |= 1 << x
        self.open_out = _windows(gaps, ((x.first, gaps - 1) for x in timeline.page_outs))
        self.unused = _windows(gaps, ((x.unused, gaps - 1) for x in timeline.page_outs))
        self.jobs = _Jobs(timeline)
        self.made = 0
        self.choices = 1
        self.complete = True

    def run(self, width: int, choices: int) -> Found:
        """Go through all gaps with so many labels, and transfers to begin next."""
        self.made = 0
        self.choices = choices
        self.complete = True
        labels = [_Label(0.0, 0.0, 0, 0, (), (), None)]
        for gap in range(len(self.line.nodes)):
            reached: dict[int, list[_Label]] = {}
            for label in labels:
                for after in self._continued(label, gap):
                    self.made += 1
                    _keep(reached.setdefault(after.ins, []), after)
            labels = [label for group in reached.values() for label in group]
            if len(labels) > width:
                self.complete = False
                ranked = [
                    (self._estimate(label, gap + 1), -label.begun, label[:4]) for label in labels
                ]
                order = sorted(range(len(labels)), key=ranked.__getitem__)
                labels = [labels[x] for x in order[:width]]
        best = min(labels, key=lambda label: (max(label.core, label.bus), label[:4]))
        return Found(max(best.core, best.bus), tuple(_path(best.trail))[::-1], self.complete)

    # -- one gap -----------------------------------------------------------------------------

    def _continued(self, label: _Label, gap: int) -> Iterator[_Label]:
        """Yield labels of the next gap: every choice of transfers here, then the computation."""
        start = self._due(self._settled(label), gap)
        seen = set()
        stack = [start]
        made = 0
        while stack:
            if made == _PER_GAP * self.choices:
                self.complete = False
                return
            made += 1
            label = stack.pop()
            after = self._computed(label, gap)
            yield after
            if label.bus >= after.core:
                continue
            for choice in reversed(list(self._choices(label, gap))):
                mark = choice[:4]
                if mark not in seen:
                    seen.add(mark)
                    stack.append(choice)

    def _settled(self, label: _Label) -> _Label:
        """Forget page-outs that are done by now."""
        if not label.going or label.going[0][1] > label.core:
            return label
        return label._replace(going=tuple(x for x in label.going if x[1] > label.core))

    def _due(self, label: _Label, gap: int) -> _Label:
        """Begin what cannot begin later."""
        for x in _bits(self.due_out[gap] & ~label.outs):
            label = self._page_out(label, x, gap)
        due = self.due_in[gap] & ~label.ins
        if due:
            for e in _bits(due):
                label = self._stored(label, e, gap)
            label = self._with_room(label, gap, 0)
            for e in _bits(due):
                label = self._page_in(label, e, gap)
        return label

    def _choices(self, label: _Label, gap: int) -> Iterator[_Label]:
        """Yield what else can begin next; of neighbours of one kind, the one due first leads."""
        last = label.trail if label.trail is not None and label.trail.gap == gap else None
        after_in = after_out = -1
        if last is not None and last.transfer.op == Op.PAGE_IN:
            after_in = last.number
        elif last is not None:
            after_out = last.number
        ready = (e for e in self._readable(label, gap) if e > after_in)
        for e in self._few(ready):
            room = self._with_room(label, gap, self.line.page_ins[e].bytes)
            yield self._page_in(room, e, gap)
        for x in self._few(x for x in _bits(self.open_out[gap] & ~label.outs) if x > after_out):
            yield self._page_out(label, x, gap)

    def _readable(self, label: _Label, gap: int) -> Iterator[int]:
        """Yield page-ins that can begin, the ones due first in front."""
        for looked, e in enumerate(_bits(self.open_in[gap] & ~label.ins)):
            if looked == _LOOKED:
                self.complete = False
                return
            source = self.line.page_ins[e].source
            stored = source is None or label.outs >> source & 1
            if stored and self._fits(label, e, gap):
                yield e

    def _few(self, numbers: Iterator[int]) -> Iterator[int]:
        """Yield the first few, and note whether that leaves any out."""
        for tried, number in enumerate(numbers):
            if tried == self.choices:
                self.complete = False
                return
            yield number

    def _computed(self, label: _Label, gap: int) -> _Label:
        """Wait for what the computation after a gap needs, and do it."""
        line = self.line
        core = label.core
        ahead = label.ahead
        if ahead and line.page_ins[ahead[0][0]].last <= gap:
            kept = []
            for e, done in ahead:
                if line.page_ins[e].last > gap:
                    kept.append((e, done))
                elif done > core:
                    core = done
            ahead = tuple(kept)
        going = label.going
        remade = self.due_out[gap]
        if remade and going:
            for x, done in going:
                if remade >> x & 1 and done > core:
                    core = done
            going = tuple(entry for entry in going if not remade >> entry[0] & 1)
        label = _Label(
            core, label.bus, label.ins, label.outs, ahead, going, label.trail, label.begun
        )
        label = self._with_room(label, gap, 0)
        return label._replace(core=label.core + line.compute_s[gap])

    # -- one transfer ------------------------------------------------------------------------

    def _stored(self, label: _Label, e: int, gap: int) -> _Label:
        """Page out what a page-in reads, and wait for that."""
        source = self.line.page_ins[e].source
        if source is None:
            return label
        if not label.outs >> source & 1:
            label = self._page_out(label, source, gap)
        for x, done in label.going:
            if x == source:
                going = tuple(entry for entry in label.going if entry[0] != x)
                return label._replace(core=max(label.core, done), going=going)
        return label

    def _page_in(self, label: _Label, e: int, gap: int) -> _Label:
        label = self._stored(label, e, gap)
        into = self.line.page_ins[e]
        done = max(label.core, label.bus) + into.time_s
        ahead = tuple(sorted((*label.ahead, (e, done))))
        trail = _Trail(label.trail, gap, e, Instruction(Op.PAGE_IN, into.tensor))
        return _Label(
            label.core,
            done,
            label.ins | 1 << e,
            label.outs,
            ahead,
            label.going,
            trail,
            label.begun + into.time_s,
        )

    def _page_out(self, label: _Label, x: int, gap: int) -> _Label:
        out = self.line.page_outs[x]
        done = max(label.core, label.bus) + out.time_s
        going = (*label.going, (x, done))
        trail = _Trail(label.trail, gap, x, Instruction(Op.PAGE_OUT, out.tensor))
        return _Label(
            label.core,
            done,
            label.ins,
            label.outs | 1 << x,
            label.ahead,
            going,
            trail,
            label.begun + out.time_s,
        )

    # -- RAM ---------------------------------------------------------------------------------

    def _fits(self, label: _Label, e: int, gap: int) -> bool:
        """Return whether a page-in fits beside the others begun, up to its use."""
        line = self.line
        into = line.page_ins[e]
        if not label.ahead:
            return True  # the window says so
        room = line.budget_bytes - into.bytes
        others = [(line.page_ins[f].last, line.page_ins[f].bytes) for f, _ in label.ahead]
        held = sum(size for last, size in others if last > gap)
        place = gap
        for last, size in others:
            if last <= gap:
                continue
            end = min(last, into.last)
            if place < end and max(line.need_bytes[place:end]) + held > room:
                return False
            held -= size
            place = max(place, end)
        return True

    def _with_room(self, label: _Label, gap: int, size_bytes: int) -> _Label:
        """Wait for page-outs until the computation after a gap fits, beside so many bytes."""
        line = self.line
        excess = line.need_bytes[gap] + size_bytes - line.budget_bytes
        for e, _ in label.ahead:
            if line.page_ins[e].last > gap:
                excess += line.page_ins[e].bytes
        unused = self.unused[gap]
        for x, _ in label.going:
            if unused >> x & 1:
                excess += line.page_outs[x].bytes
        held = unused & ~label.outs
        while held:
            low = held & -held
            excess += line.page_outs[low.bit_length() - 1].bytes
            held ^= low
        if excess <= 0:
            return label
        return self._released(label, gap, excess)

    def _released(self, label: _Label, gap: int, excess: int) -> _Label:
        """Wait for page-outs, those under way first, until `excess` bytes are free."""
        outs, unused = self.line.page_outs, self.unused[gap]
        core = label.core
        going = []
        for x, done in label.going:
            if excess > 0 and unused >> x & 1:
                excess -= outs[x].bytes
                core = max(core, done)
            elif done > core:
                going.append((x, done))
        label = label._replace(core=core, going=tuple(going))
        for x in _bits(unused & ~label.outs):
            if excess <= 0:
                break
            label = self._page_out(label, x, gap)
            excess -= outs[x].bytes
            label = label._replace(core=label.bus, going=())
        return label

    # -- judging -----------------------------------------------------------------------------

    def _estimate(self, label: _Label, gap: int) -> float:
        """Return about when a label can be done: transfers one by one, as they are due."""
        rest = self.line.rest_s
        page_ins, page_outs = self.line.page_ins, self.line.page_outs
        core = label.core
        best = core + rest[gap]
        for e, done in label.ahead:
            best = max(best, done + rest[page_ins[e].last])
        for x, done in label.going:
            if page_outs[x].due >= gap:
                best = max(best, done + rest[page_outs[x].due])
        bus = max(core, label.bus)
        start = core + rest[gap]
        begun = (label.outs, label.ins)
        begin, end = self.jobs.window(gap)
        later = label.begun - self.jobs.before_s[begin]
        for due, first, time_s, kind, bit in self.jobs.order[begin:end]:
            if begun[kind] & bit:
                later -= time_s
                continue
            if first > gap:
                bus = max(bus, start - rest[first])
            bus += time_s
            best = max(best, bus + rest[due])
        return max(best, bus - later + self.jobs.after_s[end])


class _Jobs:
    """The transfers as they are due."""

    def __init__(self, line: Timeline) -> None:
        order = [
            *((out.due, out.first, out.time_s, 0, 1 << x) for x, out in enumerate(line.page_outs)),
            *(
                (into.last, into.first, into.time_s, 1, 1 << e)
                for e, into in enumerate(line.page_ins)
            ),
        ]
        self.order = sorted(order)
        """Due gap, first gap, time, kind (0 out, 1 in) and bit of each."""
        self.before_s = [0.0, *accumulate(job[2] for job in self.order)]
        """Bus time of those before each."""
        self.after_s = [0.0] * (len(order) + 1)
        """How long it takes from the start of each to the end of the program, one by one."""
        for x in range(len(order) - 1, -1, -1):
            due, _, time_s, _, _ = self.order[x]
            self.after_s[x] = time_s + max(self.after_s[x + 1], line.rest_s[due])
        self._places = [job[0] for job in self.order]

    def window(self, gap: int) -> tuple[int, int]:
        """Return which transfers an estimate at a gap looks at one by one."""
        begin = bisect_left(self._places, gap)
        return begin, min(begin + _AHEAD, len(self.order))


def _windows(gaps: int, windows: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each gap the windows that it lies in, one bit each."""
    at = [0] * gaps
    for bit, (first, last) in enumerate(windows):
        for gap in range(first, last + 1):
            at[gap] |= 1 << bit
    return at


def _keep(group: list[_Label], label: _Label) -> None:
    """Note a label unless another is at least as early in everything; drop those it beats."""
    if any(_no_later(other, label) for other in group):
        return
    group[:] = [other for other in group if not _no_later(label, other)]
    group.append(label)


def _no_later(a: _Label, b: _Label) -> bool:
    """Return whether `a` is behind `b` in nothing."""
    if a.core > b.core or a.bus > b.bus or b.outs & ~a.outs:
        return False
    if any(one[1] > other[1] for one, other in zip(a.ahead, b.ahead, strict=True)):
        return False
    if not a.going:
        return True
    ends = dict(b.going)
    return all(done <= ends.get(x, b.core) for x, done in a.going)


def _path(trail: _Trail | None) -> Iterator[tuple[int, Instruction]]:
    while trail is not None:
        yield trail.gap, trail.transfer
        trail = trail.before


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
