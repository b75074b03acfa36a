"""Search for the places of transfers with the least makespan: labels and a beam, gap by gap."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.clock import check_time_limit
from poetmodel.errors import InputError
from poetmodel.plan import Instruction, Op
from poetmodel.problem import RELATIVE_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.planner.windows import TransferWindows


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParameters:
    """How much of all choices the search looks at; every number is 1 or more."""

    rounds: tuple[tuple[int, int], ...] = (
        *((3, 1), (12, 1), (32, 1)),
        *((24, 2), (64, 4), (256, 4), (1024, 4)),
    )
    """Round by round: labels kept per gap, and transfers of a kind that may begin next."""
    labels: int = 6_000
    """Labels that all rounds after the first may make together, about."""
    continuations: int = 6
    """Continuations of one label in one gap, for each transfer that may begin next."""
    candidates: int = 8
    """Page-ins that are tried for room in one gap."""
    lookahead: int = 24
    """Transfers that an estimate takes one by one."""

    def __post_init__(self) -> None:
        numbers = (self.labels, self.continuations, self.candidates, self.lookahead)
        if not self.rounds or min(*chain(*self.rounds), *numbers) < 1:
            raise InputError(f"parameters of the search: expected numbers from 1, got {self}")


DEFAULT_PARAMETERS: Final = SearchParameters()


class _Trail(NamedTuple):
    """Transfers begun, the last first."""

    before: _Trail | None
    gap: int
    number: int
    transfer: Instruction


class _Label(NamedTuple):
    """History up to a gap; the first four fields are its rank among equal estimates."""

    core: float
    """When the core comes to the gap [s]."""
    bus: float
    """When the bus is free [s]."""
    ins: int
    """Page-ins begun, one bit each."""
    outs: int
    """Page-outs begun, one bit each."""
    arriving: tuple[tuple[int, float], ...]
    """Page-ins begun whose reader is still to come, with their ends, by number."""
    leaving: tuple[tuple[int, float], ...]
    """Page-outs not waited for, with their ends, in bus order."""
    trail: _Trail | None
    """Transfers begun."""
    begun: float
    """Bus time of the transfers begun [s]."""


class BestTransfers(NamedTuple):
    """The transfers with the least makespan that a search found."""

    makespan_s: float
    """When core and bus are done [s]."""
    transfers: tuple[tuple[int, Instruction], ...]
    """Transfers with their gaps, in bus order."""
    complete: bool
    """Whether no label was left out."""


def best_transfers(
    windows: TransferWindows, parameters: SearchParameters = DEFAULT_PARAMETERS
) -> BestTransfers:
    """Choose where transfers begin; in small cases nearly always with the least makespan.

    A label is a choice of transfers up to a gap. From gap to gap every label is continued in every
    way that can pay: a transfer begins only if the bus would otherwise idle before the next gap,
    since beginning later costs nothing else. A label that is dominated (the same transfers have
    begun, and another label is behind in nothing) is dropped; of the rest, the first few by the
    least estimate stay. If that left any out, the next round keeps more, as long as the number of
    labels is likely to suffice.
    """
    search = _BeamSearch(windows, parameters)
    bound = max(windows.rest_s[0], search.estimates.before_s[-1]) * (1 + RELATIVE_TOLERANCE)
    left = parameters.labels
    (width, choices), *wider = parameters.rounds
    best = search.run(width, choices)
    spent = search.extensions / width
    for width, choices in wider:
        if best.complete or best.makespan_s <= bound:
            break
        if spent * width > left:
            continue
        timing = search.run(width, choices)
        left -= search.extensions
        spent = search.extensions / width
        if timing.complete or timing.makespan_s < best.makespan_s:
            best = timing
    return best


class _BeamSearch:
    """The rounds of one search."""

    def __init__(self, windows: TransferWindows, parameters: SearchParameters) -> None:
        self.windows, self.parameters = windows, parameters
        gaps = len(windows.nodes) + 1
        self.due_in = _open_bits(gaps, ((x.last, x.last) for x in windows.page_ins))
        self.open_in = _open_bits(gaps, ((x.first, x.last) for x in windows.page_ins))
        self.due_out = _open_bits(gaps, ((x.last, x.last) for x in windows.page_outs))
        self.open_out = _open_bits(gaps, ((x.first, gaps - 1) for x in windows.page_outs))
        self.held = _open_bits(gaps, ((x.held_from, gaps - 1) for x in windows.page_outs))
        self.estimates = _Estimates(windows, parameters.lookahead)
        self.extensions = 0
        self.choices = 1
        self.complete = True

    def run(self, width: int, choices: int) -> BestTransfers:
        """Go through all gaps with so many labels, and transfers to begin next."""
        self.extensions = 0
        self.choices = choices
        self.complete = True
        labels = [_Label(0.0, 0.0, 0, 0, arriving=(), leaving=(), trail=None, begun=0.0)]
        for gap in range(len(self.windows.nodes)):
            check_time_limit()
            reached: dict[int, list[_Label]] = {}
            for label in labels:
                for after in self._continued(label, gap):
                    self.extensions += 1
                    _keep(reached.setdefault(after.ins, []), after)
            labels = [label for group in reached.values() for label in group]
            if len(labels) > width:
                self.complete = False
                ranked = [
                    (self.estimates.end_s(label, gap + 1), -label.begun, label[:4])
                    for label in labels
                ]
                order = sorted(range(len(labels)), key=ranked.__getitem__)
                labels = [labels[x] for x in order[:width]]
        labels = [self._due(label, len(self.windows.nodes)) for label in labels]  # write-backs
        best = min(labels, key=lambda label: (max(label.core, label.bus), label[:4]))
        makespan_s = max(best.core, best.bus)
        return BestTransfers(makespan_s, tuple(_path(best.trail))[::-1], self.complete)

    # -- one gap -----------------------------------------------------------------------------

    def _continued(self, label: _Label, gap: int) -> Iterator[_Label]:
        """Yield labels of the next gap: every choice of transfers here, then the computation."""
        if label.leaving and label.leaving[0][1] <= label.core:  # the first ones are done by now
            label = label._replace(leaving=tuple(x for x in label.leaving if x[1] > label.core))
        stack = [self._due(label, gap)]
        seen = set()
        count = 0
        while stack:
            if count == self.parameters.continuations * self.choices:
                self.complete = False
                return
            count += 1
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
        after_in = after_out = -1
        if label.trail is not None and label.trail.gap == gap:
            if label.trail.transfer.op == Op.PAGE_IN:
                after_in = label.trail.number
            else:
                after_out = label.trail.number
        for e in self._few(e for e in self._readable(label, gap) if e > after_in):
            room = self._with_room(label, gap, self.windows.page_ins[e].bytes)
            yield self._page_in(room, e, gap)
        for x in self._few(x for x in _bits(self.open_out[gap] & ~label.outs) if x > after_out):
            yield self._page_out(label, x, gap)

    def _readable(self, label: _Label, gap: int) -> Iterator[int]:
        """Yield page-ins that can begin, the ones due first in front."""
        for tried, e in enumerate(_bits(self.open_in[gap] & ~label.ins)):
            if tried == self.parameters.candidates:
                self.complete = False
                return
            source = self.windows.page_ins[e].source
            if (source is None or label.outs >> source & 1) and self._fits(label, e, gap):
                yield e

    def _few(self, numbers: Iterator[int]) -> Iterator[int]:
        """Yield the first few, and note whether that leaves any out."""
        for tried, number in enumerate(numbers):
            if tried == self.choices:
                self.complete = False
                return
            yield number

    def _computed(self, label: _Label, gap: int) -> _Label:
        """Wait for what the computation after a gap needs, and execute it."""
        page_ins = self.windows.page_ins
        core, arriving, leaving = label.core, label.arriving, label.leaving
        if arriving and page_ins[arriving[0][0]].last <= gap:
            core = max([core, *(done for e, done in arriving if page_ins[e].last <= gap)])
            arriving = tuple(entry for entry in arriving if page_ins[entry[0]].last > gap)
        recomputed = self.due_out[gap]
        if recomputed and leaving:
            core = max([core, *(done for x, done in leaving if recomputed >> x & 1)])
            leaving = tuple(entry for entry in leaving if not recomputed >> entry[0] & 1)
        label = label._replace(core=core, arriving=arriving, leaving=leaving)
        label = self._with_room(label, gap, 0)
        return label._replace(core=label.core + self.windows.compute_s[gap])

    # -- one transfer ------------------------------------------------------------------------

    def _stored(self, label: _Label, e: int, gap: int) -> _Label:
        """Page out what a page-in reads, and wait for that."""
        source = self.windows.page_ins[e].source
        if source is None:
            return label
        if not label.outs >> source & 1:
            label = self._page_out(label, source, gap)
        # A tensor has one transfer at a time: its page-out ends before its page-in begins.
        for x, done in label.leaving:
            if x == source:
                leaving = tuple(entry for entry in label.leaving if entry[0] != x)
                return label._replace(core=max(label.core, done), leaving=leaving)
        return label

    def _page_in(self, label: _Label, e: int, gap: int) -> _Label:
        label = self._stored(label, e, gap)
        into = self.windows.page_ins[e]
        done = max(label.core, label.bus) + into.time_s
        return label._replace(
            bus=done,
            ins=label.ins | 1 << e,
            arriving=tuple(sorted((*label.arriving, (e, done)))),
            trail=_Trail(label.trail, gap, e, Instruction(Op.PAGE_IN, into.tensor)),
            begun=label.begun + into.time_s,
        )

    def _page_out(self, label: _Label, x: int, gap: int) -> _Label:
        out = self.windows.page_outs[x]
        done = max(label.core, label.bus) + out.time_s
        return label._replace(
            bus=done,
            outs=label.outs | 1 << x,
            leaving=(*label.leaving, (x, done)),
            trail=_Trail(label.trail, gap, x, Instruction(Op.PAGE_OUT, out.tensor)),
            begun=label.begun + out.time_s,
        )

    # -- RAM ---------------------------------------------------------------------------------

    def _fits(self, label: _Label, e: int, gap: int) -> bool:
        """Whether a page-in fits beside the others begun, up to its use."""
        if not label.arriving:
            return True  # its window says so
        windows, into = self.windows, self.windows.page_ins[e]
        room = windows.budget_bytes - into.bytes
        others = [windows.page_ins[f] for f, _ in label.arriving if windows.page_ins[f].last > gap]
        held = sum(other.bytes for other in others)
        position = gap
        for other in others:
            end = min(other.last, into.last)
            if position < end and max(windows.need_bytes[position:end]) + held > room:
                return False
            held -= other.bytes
            position = max(position, end)
        return True

    def _with_room(self, label: _Label, gap: int, size_bytes: int) -> _Label:
        """Wait for page-outs until the computation after a gap fits, beside so many bytes."""
        page_ins, page_outs = self.windows.page_ins, self.windows.page_outs
        excess = self.windows.need_bytes[gap] + size_bytes - self.windows.budget_bytes
        for e, _ in label.arriving:
            if page_ins[e].last > gap:
                excess += page_ins[e].bytes
        held = self.held[gap]
        for x, _ in label.leaving:
            if held >> x & 1:
                excess += page_outs[x].held_bytes(gap)
        for x in _bits(held & ~label.outs):
            excess += page_outs[x].held_bytes(gap)
        return label if excess <= 0 else self._released(label, gap, excess)

    def _released(self, label: _Label, gap: int, excess: int) -> _Label:
        """Wait for page-outs, those under way first, until `excess` bytes are free."""
        outs, held = self.windows.page_outs, self.held[gap]
        core, leaving = label.core, []
        for x, done in label.leaving:
            if excess > 0 and held >> x & 1:
                excess -= outs[x].held_bytes(gap)
                core = max(core, done)
            elif done > core:
                leaving.append((x, done))
        label = label._replace(core=core, leaving=tuple(leaving))
        for x in _bits(held & ~label.outs):
            if excess <= 0:
                break
            label = self._page_out(label, x, gap)
            excess -= outs[x].held_bytes(gap)
            # The bus works in order: once this transfer is done, all before it are.
            label = label._replace(core=label.bus, leaving=())
        return label


class _DueTransfer(NamedTuple):
    """A transfer as an estimate sees it."""

    due: int
    first: int
    time_s: float
    is_page_in: bool
    bit: int


class _Estimates:
    """When labels can be done, about: transfers one by one, as they are due."""

    def __init__(self, windows: TransferWindows, lookahead: int) -> None:
        self.windows, self.lookahead = windows, lookahead
        ins = ((x.last, x.first, x.time_s) for x in windows.page_ins)
        outs = ((x.due, x.first, x.time_s) for x in windows.page_outs)
        self.order = sorted(
            _DueTransfer(*times, is_page_in=is_page_in, bit=1 << number)
            for is_page_in, transfers in ((False, outs), (True, ins))
            for number, times in enumerate(transfers)
        )
        self.before_s = [0.0, *accumulate(transfer.time_s for transfer in self.order)]
        """Bus time of those before each."""
        self.after_s = [0.0] * (len(self.order) + 1)
        """How long it takes from the start of each to the end of the program, one by one."""
        for x, transfer in reversed(list(enumerate(self.order))):
            end_s = max(self.after_s[x + 1], windows.rest_s[transfer.due])
            self.after_s[x] = transfer.time_s + end_s
        self._due_gaps = [transfer.due for transfer in self.order]

    def end_s(self, label: _Label, gap: int) -> float:
        """Return about when a label that has come to a gap can be done [s]."""
        rest = self.windows.rest_s
        page_ins, page_outs = self.windows.page_ins, self.windows.page_outs
        core = label.core
        best = core + rest[gap]
        for e, done in label.arriving:
            best = max(best, done + rest[page_ins[e].last])
        for x, done in label.leaving:
            if page_outs[x].due >= gap:
                best = max(best, done + rest[page_outs[x].due])
        bus = max(core, label.bus)
        start = core + rest[gap]
        begin = bisect_left(self._due_gaps, gap)
        end = min(begin + self.lookahead, len(self.order))
        # Bus time of transfers that began ahead of their turn, which the sum counts again.
        later = label.begun - self.before_s[begin]
        for due, first, time_s, is_page_in, bit in self.order[begin:end]:
            if (label.ins if is_page_in else label.outs) & bit:
                later -= time_s
                continue
            if first > gap:
                bus = max(bus, start - rest[first])
            bus += time_s
            best = max(best, bus + rest[due])
        return max(best, bus - later + self.after_s[end])


def _open_bits(gaps: int, windows: Iterable[tuple[int, int]]) -> list[int]:
    """Return the windows that each gap lies in, one bit each."""
    at = [0] * gaps
    for bit, (first, last) in enumerate(windows):
        for gap in range(first, last + 1):
            at[gap] |= 1 << bit
    return at


def _keep(group: list[_Label], label: _Label) -> None:
    """Add a label unless another one dominates it; drop those that it dominates."""
    if any(_dominates(other, label) for other in group):
        return
    group[:] = [other for other in group if not _dominates(label, other)]
    group.append(label)


def _dominates(a: _Label, b: _Label) -> bool:
    """Whether `a`, with the same page-ins begun, is behind `b` in nothing."""
    if a.core > b.core or a.bus > b.bus or b.outs & ~a.outs:
        return False
    if any(own[1] > other[1] for own, other in zip(a.arriving, b.arriving, strict=True)):
        return False
    if not a.leaving:
        return True
    # What b no longer has under way, or has not begun, a must be through with by then.
    ends = dict(b.leaving)
    return all(done <= ends.get(x, b.core) for x, done in a.leaving)


def _path(trail: _Trail | None) -> Iterator[tuple[int, Instruction]]:
    while trail is not None:
        yield trail.gap, trail.transfer
        trail = trail.before


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
