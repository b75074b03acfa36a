"""Search for the order and start of transfers with the smallest makespan, by labels and a beam.

The search proceeds interval by interval. Interval `g` is the time between computations `g - 1` and
`g`, in which transfers may begin.
"""

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
    """Effort of the search; each number is at least 1."""

    rounds: tuple[tuple[int, int], ...] = (
        *((3, 1), (12, 1), (32, 1)),
        *((24, 2), (64, 4), (256, 4), (1024, 4)),
    )
    """For each round the beam width (labels per interval), and the number of transfers of each kind
    that are tried next."""
    labels: int = 6_000
    """Approximate maximum number of labels created by all rounds after the first."""
    continuations: int = 6
    """Maximum continuations of one label in one interval, per transfer that is tried next."""
    candidates: int = 8
    """Maximum page-ins per interval that are checked for free RAM."""
    lookahead: int = 24
    """Number of next transfers that an estimate simulates one by one."""

    def __post_init__(self) -> None:
        numbers = (self.labels, self.continuations, self.candidates, self.lookahead)
        if not self.rounds or min(*chain(*self.rounds), *numbers) < 1:
            raise InputError(f"parameters of the search: expected numbers from 1, got {self}")


DEFAULT_PARAMETERS: Final = SearchParameters()


class _Trail(NamedTuple):
    """Linked list of the transfers that a label has begun, latest first."""

    previous: _Trail | None
    interval: int
    number: int
    transfer: Instruction


class _Label(NamedTuple):
    """State of a partial program at an interval; the first four fields break ties."""

    core: float
    """Time at which the core reaches the interval [s]."""
    bus: float
    """Time at which the bus becomes idle [s]."""
    ins: int
    """Bit mask of the page-ins that have begun."""
    outs: int
    """Bit mask of the page-outs that have begun."""
    arriving: tuple[tuple[int, float], ...]
    """(index, end) of each page-in that has begun and whose reader has not run, sorted by index."""
    leaving: tuple[tuple[int, float], ...]
    """(index, end) of each page-out that no computation has waited for, in bus order."""
    trail: _Trail | None
    """Transfers that have begun, latest first."""
    begun_s: float
    """Bus time of the transfers that have begun [s]."""


class BestTransfers(NamedTuple):
    """Transfers with the smallest makespan that a search found."""

    makespan_s: float
    """Time at which core and bus finish [s]."""
    transfers: tuple[tuple[int, Instruction], ...]
    """(interval, transfer) pairs in bus order."""
    is_exhaustive: bool
    """Whether the search skipped no label, so that the makespan is optimal."""


def best_transfers(
    windows: TransferWindows, parameters: SearchParameters = DEFAULT_PARAMETERS
) -> BestTransfers:
    """Choose the interval in which each transfer begins, so that the makespan is small.

    In small cases the makespan is nearly always minimal. A label is a choice of transfers up to an
    interval. From interval to interval, each label is extended by all choices that can help: a
    transfer begins only if the bus would otherwise idle before the next interval, because otherwise
    a later begin costs no time. A label is discarded if it is dominated: another label has begun
    the same page-ins, and none of its times is later. Of the remaining labels, those with the
    smallest estimates are retained, up to the beam width. If any label was discarded by the width,
    the next round uses a larger width, as long as the number of labels is likely to suffice.
    """
    search = _BeamSearch(windows, parameters)
    bound = max(windows.rest_s[0], search.estimates.before_s[-1]) * (1 + RELATIVE_TOLERANCE)
    labels_left = parameters.labels
    (width, choices), *wider_rounds = parameters.rounds
    best_choice = search.run(width, choices)
    labels_per_width = search.extensions / width
    for width, choices in wider_rounds:
        if best_choice.is_exhaustive or best_choice.makespan_s <= bound:
            break
        if labels_per_width * width > labels_left:
            continue
        timing = search.run(width, choices)
        labels_left -= search.extensions
        labels_per_width = search.extensions / width
        if timing.is_exhaustive or timing.makespan_s < best_choice.makespan_s:
            best_choice = timing
    return best_choice


class _BeamSearch:
    """The beam search of all rounds; `extensions` counts the labels of the current round."""

    def __init__(self, windows: TransferWindows, parameters: SearchParameters) -> None:
        """Prepare the search over the intervals of `windows`; `run` does one round."""
        self.windows, self.parameters = windows, parameters
        n_intervals = len(windows.nodes) + 1
        self.due_page_ins = _window_masks(n_intervals, ((x.last, x.last) for x in windows.page_ins))
        self.open_page_ins = _window_masks(
            n_intervals, ((x.first, x.last) for x in windows.page_ins)
        )
        self.due_page_outs = _window_masks(
            n_intervals, ((x.last, x.last) for x in windows.page_outs)
        )
        self.open_page_outs = _window_masks(
            n_intervals, ((x.first, n_intervals - 1) for x in windows.page_outs)
        )
        self.held_by_page_outs = _window_masks(
            n_intervals, ((x.held_from, n_intervals - 1) for x in windows.page_outs)
        )
        self.estimates = _Estimates(windows, parameters.lookahead)
        self.extensions = 0
        self.choices = 1
        self.is_exhaustive = True

    def run(self, width: int, choices: int) -> BestTransfers:
        """Search all intervals with a beam width and a maximum number of transfers to try next."""
        self.extensions = 0
        self.choices = choices
        self.is_exhaustive = True
        labels = [_Label(0.0, 0.0, 0, 0, arriving=(), leaving=(), trail=None, begun_s=0.0)]
        for interval in range(len(self.windows.nodes)):
            check_time_limit()
            labels_by_page_ins: dict[int, list[_Label]] = {}
            for label in labels:
                for next_label in self._extensions(label, interval):
                    self.extensions += 1
                    _add_undominated(labels_by_page_ins.setdefault(next_label.ins, []), next_label)
            labels = [label for group in labels_by_page_ins.values() for label in group]
            if len(labels) > width:
                self.is_exhaustive = False
                ranks = [
                    (self.estimates.end_s(label, interval + 1), -label.begun_s, label[:4])
                    for label in labels
                ]
                order = sorted(range(len(labels)), key=ranks.__getitem__)
                labels = [labels[x] for x in order[:width]]
        labels = [
            self._begin_due(label, len(self.windows.nodes)) for label in labels
        ]  # write-backs
        best_label = min(labels, key=lambda label: (max(label.core, label.bus), label[:4]))
        makespan_s = max(best_label.core, best_label.bus)
        return BestTransfers(
            makespan_s, tuple(_latest_first(best_label.trail))[::-1], self.is_exhaustive
        )

    # -- one interval ------------------------------------------------------------------------

    def _extensions(self, label: _Label, interval: int) -> Iterator[_Label]:
        """Yield labels of the next interval: each choice of transfers, then the computation."""
        if label.leaving and label.leaving[0][1] <= label.core:  # some have finished
            label = label._replace(leaving=tuple(x for x in label.leaving if x[1] > label.core))
        stack = [self._begin_due(label, interval)]
        ranks = set()
        count = 0
        while stack:
            if count == self.parameters.continuations * self.choices:
                self.is_exhaustive = False
                return
            count += 1
            label = stack.pop()
            next_label = self._compute(label, interval)
            yield next_label
            if label.bus >= next_label.core:
                continue
            for choice in reversed(list(self._next_transfers(label, interval))):
                rank = choice[:4]
                if rank not in ranks:
                    ranks.add(rank)
                    stack.append(choice)

    def _begin_due(self, label: _Label, interval: int) -> _Label:
        """Begin the transfers whose last interval this is; return the new label."""
        for page_out in _set_bits(self.due_page_outs[interval] & ~label.outs):
            label = self._page_out(label, page_out, interval)
        due_mask = self.due_page_ins[interval] & ~label.ins
        if due_mask:
            for page_in in _set_bits(due_mask):
                label = self._store_source(label, page_in, interval)
            label = self._wait_for_room(label, interval, 0)
            for page_in in _set_bits(due_mask):
                label = self._page_in(label, page_in, interval)
        return label

    def _next_transfers(self, label: _Label, interval: int) -> Iterator[_Label]:
        """Yield the labels after one more transfer: page-ins first, each kind by due interval.

        Consecutive transfers of one kind begin in index order, to avoid permutations.
        """
        last_page_in = last_page_out = -1
        if label.trail is not None and label.trail.interval == interval:
            if label.trail.transfer.op == Op.PAGE_IN:
                last_page_in = label.trail.number
            else:
                last_page_out = label.trail.number
        for page_in in self._first_choices(
            page_in
            for page_in in self._possible_page_ins(label, interval)
            if page_in > last_page_in
        ):
            with_room = self._wait_for_room(label, interval, self.windows.page_ins[page_in].bytes)
            yield self._page_in(with_room, page_in, interval)
        for page_out in self._first_choices(
            page_out
            for page_out in _set_bits(self.open_page_outs[interval] & ~label.outs)
            if page_out > last_page_out
        ):
            yield self._page_out(label, page_out, interval)

    def _possible_page_ins(self, label: _Label, interval: int) -> Iterator[int]:
        """Yield page-ins that can begin now, sorted by due interval.

        The tensor must be on storage, or its page-out must have begun, and RAM must suffice.
        """
        for n_candidates, page_in in enumerate(
            _set_bits(self.open_page_ins[interval] & ~label.ins)
        ):
            if n_candidates == self.parameters.candidates:
                self.is_exhaustive = False
                return
            source = self.windows.page_ins[page_in].source
            if (source is None or label.outs >> source & 1) and self._page_in_fits(
                label, page_in, interval
            ):
                yield page_in

    def _first_choices(self, indices: Iterator[int]) -> Iterator[int]:
        """Yield the first `choices` of the indices.

        Sets `is_exhaustive` to False if there are more.
        """
        for n_yielded, index in enumerate(indices):
            if n_yielded == self.choices:
                self.is_exhaustive = False
                return
            yield index

    def _compute(self, label: _Label, interval: int) -> _Label:
        """Wait for the transfers that the computation after an interval needs, and execute it."""
        page_ins = self.windows.page_ins
        core, arriving, leaving = label.core, label.arriving, label.leaving
        if arriving and page_ins[arriving[0][0]].last <= interval:
            core = max(
                [core, *(end for page_in, end in arriving if page_ins[page_in].last <= interval)]
            )
            arriving = tuple(entry for entry in arriving if page_ins[entry[0]].last > interval)
        recomputed = self.due_page_outs[interval]
        if recomputed and leaving:
            core = max([core, *(end for page_out, end in leaving if recomputed >> page_out & 1)])
            leaving = tuple(entry for entry in leaving if not recomputed >> entry[0] & 1)
        label = label._replace(core=core, arriving=arriving, leaving=leaving)
        label = self._wait_for_room(label, interval, 0)
        return label._replace(core=label.core + self.windows.compute_s[interval])

    # -- one transfer ------------------------------------------------------------------------

    def _store_source(self, label: _Label, page_in: int, interval: int) -> _Label:
        """Page out the tensor that a page-in reads, if necessary, and wait for the page-out."""
        source = self.windows.page_ins[page_in].source
        if source is None:
            return label
        if not label.outs >> source & 1:
            label = self._page_out(label, source, interval)
        # A tensor has at most one transfer at a time: its page-out ends before its page-in begins.
        for page_out, end in label.leaving:
            if page_out == source:
                leaving = tuple(entry for entry in label.leaving if entry[0] != page_out)
                return label._replace(core=max(label.core, end), leaving=leaving)
        return label

    def _page_in(self, label: _Label, index: int, interval: int) -> _Label:
        """Begin a page-in on the bus, after its source is on storage; return the new label."""
        label = self._store_source(label, index, interval)
        page_in = self.windows.page_ins[index]
        end = max(label.core, label.bus) + page_in.time_s
        return label._replace(
            bus=end,
            ins=label.ins | 1 << index,
            arriving=tuple(sorted((*label.arriving, (index, end)))),
            trail=_Trail(label.trail, interval, index, Instruction(Op.PAGE_IN, page_in.tensor)),
            begun_s=label.begun_s + page_in.time_s,
        )

    def _page_out(self, label: _Label, index: int, interval: int) -> _Label:
        """Begin a page-out on the bus; return the new label."""
        page_out = self.windows.page_outs[index]
        end = max(label.core, label.bus) + page_out.time_s
        return label._replace(
            bus=end,
            outs=label.outs | 1 << index,
            leaving=(*label.leaving, (index, end)),
            trail=_Trail(label.trail, interval, index, Instruction(Op.PAGE_OUT, page_out.tensor)),
            begun_s=label.begun_s + page_out.time_s,
        )

    # -- RAM ---------------------------------------------------------------------------------

    def _page_in_fits(self, label: _Label, index: int, interval: int) -> bool:
        """Return whether a page-in that begins now fits in RAM until its use.

        RAM must also hold all page-ins that have begun and whose reader has not run.
        """
        if not label.arriving:
            return True  # the window of the page-in ensures that it fits alone
        windows, page_in = self.windows, self.windows.page_ins[index]
        free_bytes = windows.budget_bytes - page_in.bytes
        pending_page_ins = [
            windows.page_ins[pending_index]
            for pending_index, _ in label.arriving
            if windows.page_ins[pending_index].last > interval
        ]
        pending_bytes = sum(pending_page_in.bytes for pending_page_in in pending_page_ins)
        position = interval
        for pending_page_in in pending_page_ins:
            end = min(pending_page_in.last, page_in.last)
            if (
                position < end
                and max(windows.need_bytes[position:end]) + pending_bytes > free_bytes
            ):
                return False
            pending_bytes -= pending_page_in.bytes
            position = max(position, end)
        return True

    def _wait_for_room(self, label: _Label, interval: int, extra_bytes: int) -> _Label:
        """Return the label after waits for page-outs.

        The core waits until the next computation and `extra_bytes` fit in RAM.
        """
        page_ins, page_outs = self.windows.page_ins, self.windows.page_outs
        excess = self.windows.need_bytes[interval] + extra_bytes - self.windows.budget_bytes
        for page_in, _ in label.arriving:
            if page_ins[page_in].last > interval:
                excess += page_ins[page_in].bytes
        held_by_page_outs = self.held_by_page_outs[interval]
        for page_out, _ in label.leaving:
            if held_by_page_outs >> page_out & 1:
                excess += page_outs[page_out].held_bytes(interval)
        for page_out in _set_bits(held_by_page_outs & ~label.outs):
            excess += page_outs[page_out].held_bytes(interval)
        return label if excess <= 0 else self._free_bytes(label, interval, excess)

    def _free_bytes(self, label: _Label, interval: int, excess: int) -> _Label:
        """Return the label after waits for page-outs, until `excess` bytes are free.

        Waits first for page-outs that have begun; then begins further ones and waits for them.
        """
        page_outs, held_by_page_outs = self.windows.page_outs, self.held_by_page_outs[interval]
        core_s, leaving = label.core, []
        for page_out, end in label.leaving:
            if excess > 0 and held_by_page_outs >> page_out & 1:
                excess -= page_outs[page_out].held_bytes(interval)
                core_s = max(core_s, end)
            elif end > core_s:
                leaving.append((page_out, end))
        label = label._replace(core=core_s, leaving=tuple(leaving))
        for page_out in _set_bits(held_by_page_outs & ~label.outs):
            if excess <= 0:
                break
            label = self._page_out(label, page_out, interval)
            excess -= page_outs[page_out].held_bytes(interval)
            # The bus is sequential: the end of this transfer implies the end of all earlier ones.
            label = label._replace(core=label.bus, leaving=())
        return label


class _DueTransfer(NamedTuple):
    """A transfer in an estimate of the makespan."""

    due: int
    """Due interval."""
    first: int
    """First interval in which it may begin."""
    time_s: float
    """Duration on the bus [s]."""
    is_page_in: bool
    bit: int
    """Bit of the transfer in the masks of a label."""


class _Estimates:
    """Estimates of the makespan of labels: the remaining transfers run one by one in due order."""

    def __init__(self, windows: TransferWindows, lookahead: int) -> None:
        """Sort the transfers of `windows` by due interval.

        Estimates simulate the next `lookahead` transfers one by one.
        """
        self.windows, self.lookahead = windows, lookahead
        page_ins = ((x.last, x.first, x.time_s) for x in windows.page_ins)
        page_outs = ((x.due, x.first, x.time_s) for x in windows.page_outs)
        self.order = sorted(
            _DueTransfer(*times, is_page_in=is_page_in, bit=1 << number)
            for is_page_in, transfers in ((False, page_outs), (True, page_ins))
            for number, times in enumerate(transfers)
        )
        self.before_s = [0.0, *accumulate(transfer.time_s for transfer in self.order)]
        """Bus time of all transfers before each one in due order [s]."""
        self.after_s = [0.0] * (len(self.order) + 1)
        """Time from the start of each transfer to the end of the program, one by one in due order
        [s]."""
        for x, transfer in reversed(list(enumerate(self.order))):
            end_s = max(self.after_s[x + 1], windows.rest_s[transfer.due])
            self.after_s[x] = transfer.time_s + end_s
        self._due_intervals = [transfer.due for transfer in self.order]

    def end_s(self, label: _Label, interval: int) -> float:
        """Return the estimated makespan of a label that has reached an interval [s]."""
        rest_s = self.windows.rest_s
        page_ins, page_outs = self.windows.page_ins, self.windows.page_outs
        core_s = label.core
        max_end_s = core_s + rest_s[interval]
        for page_in, end_s in label.arriving:
            max_end_s = max(max_end_s, end_s + rest_s[page_ins[page_in].last])
        for page_out, end_s in label.leaving:
            if page_outs[page_out].due >= interval:
                max_end_s = max(max_end_s, end_s + rest_s[page_outs[page_out].due])
        bus_s = max(core_s, label.bus)
        last_start_s = core_s + rest_s[interval]
        begin = bisect_left(self._due_intervals, interval)
        end = min(begin + self.lookahead, len(self.order))
        # Bus time of transfers that began before transfers that are due earlier; the sum counts it
        # twice.
        counted_twice_s = label.begun_s - self.before_s[begin]
        for due, first, time_s, is_page_in, bit in self.order[begin:end]:
            if (label.ins if is_page_in else label.outs) & bit:
                counted_twice_s -= time_s
                continue
            if first > interval:
                bus_s = max(bus_s, last_start_s - rest_s[first])
            bus_s += time_s
            max_end_s = max(max_end_s, bus_s + rest_s[due])
        return max(max_end_s, bus_s - counted_twice_s + self.after_s[end])


def _window_masks(n_intervals: int, windows: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each interval the bit mask of the windows that contain it."""
    masks = [0] * n_intervals
    for bit, (first, last) in enumerate(windows):
        for interval in range(first, last + 1):
            masks[interval] |= 1 << bit
    return masks


def _add_undominated(group: list[_Label], label: _Label) -> None:
    """Add a label to a group unless a label of the group dominates it.

    Removes the labels of the group that the added label dominates.
    """
    if any(_dominates(existing, label) for existing in group):
        return
    group[:] = [existing for existing in group if not _dominates(label, existing)]
    group.append(label)


def _dominates(a: _Label, b: _Label) -> bool:
    """Return whether no time of label `a` is later than that of label `b`.

    Both labels have begun the same page-ins.
    """
    if a.core > b.core or a.bus > b.bus or b.outs & ~a.outs:
        return False
    if any(
        a_entry[1] > b_entry[1] for a_entry, b_entry in zip(a.arriving, b.arriving, strict=True)
    ):
        return False
    if not a.leaving:
        return True
    # A page-out that is pending in a must end no later than in b, or than b's core time.
    ends = dict(b.leaving)
    return all(end_s <= ends.get(x, b.core) for x, end_s in a.leaving)


def _latest_first(trail: _Trail | None) -> Iterator[tuple[int, Instruction]]:
    while trail is not None:
        yield trail.interval, trail.transfer
        trail = trail.previous


def _set_bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
