"""Search for the order and start of transfers with the smallest makespan: a beam search.

The search proceeds interval by interval. Interval `g` is the time between computations `g - 1` and
`g`, in which transfers may begin.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.clock import check_time_limit
from poetmodel.plan import Instruction, Op
from poetmodel.problem import RELATIVE_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.planner.windows import TransferWindows


_ROUNDS: Final = ((3, 1), (12, 1), (32, 1), (24, 2), (64, 4), (256, 4), (1024, 4))
"""For each round the beam width (labels per interval), and the maximum number of transfers of each
kind that are tried after each transfer of a label."""
_MAX_LABELS: Final = 6_000
"""Approximate maximum number of labels created by all rounds after the first."""
_MAX_CONTINUATIONS: Final = 6
"""Maximum number of continuations of one label in one interval; multiplied by the second number of
the round."""
_MAX_PAGE_INS: Final = 8
"""Maximum number of page-ins that are considered as the next transfer of a label."""
_LOOKAHEAD: Final = 24
"""Number of next transfers, in due order, that an estimate simulates one by one; a precomputed time
stands for later ones."""


class _Trail(NamedTuple):
    """Linked list of the transfers that a label has begun, latest first."""

    previous: _Trail | None
    """Trail without this transfer; None for the first one."""
    interval: int
    """Interval in which the transfer began."""
    number: int
    """Index among the page-ins or the page-outs of the windows."""
    transfer: Instruction


class _Label(NamedTuple):
    """State of a partial program at an interval, identified there by its first four fields."""

    core_s: float
    """Time at which the core reaches the interval; within it, the end of the waits so far [s]."""
    bus_s: float
    """Time at which the bus becomes idle [s]."""
    begun_ins: int
    """Bit mask of the page-ins that have begun."""
    begun_outs: int
    """Bit mask of the page-outs that have begun."""
    pending_ins: tuple[tuple[int, float], ...]
    """(index, end [s]) of each page-in that has begun and whose reader has not, by index."""
    pending_outs: tuple[tuple[int, float], ...]
    """(index, end [s]) of each page-out that has begun, in bus order, until the core waits for it
    or finds it finished."""
    trail: _Trail | None
    """Transfers that have begun, latest first."""
    transfer_s: float
    """Total duration of the transfers that have begun [s]."""


class BestTransfers(NamedTuple):
    """The transfers that a search chose, with their makespan."""

    makespan_s: float
    """Time at which core and bus finish [s]."""
    transfers: tuple[tuple[int, Instruction], ...]
    """(interval, transfer) pairs in bus order."""
    is_exhaustive: bool
    """Whether no limit of the round that found the transfers skipped a label."""


def choose_transfers(windows: TransferWindows) -> BestTransfers:
    """Choose the interval in which each transfer begins, so that the makespan is small.

    Beam search over intervals: labels (choices of transfers so far) are extended by all choices
    that can help, and dominated ones discarded. Rounds widen the beam until no label was skipped or
    the makespan equals a lower bound; rounds that would exceed `_MAX_LABELS` are skipped.
    """
    search = _BeamSearch(windows)
    bound = max(windows.remaining_s[0], search.estimates.preceding_s[-1]) * (1 + RELATIVE_TOLERANCE)
    remaining_labels = _MAX_LABELS
    (width, max_choices), *later_rounds = _ROUNDS
    best_choice = search.search_round(width, max_choices)
    labels_per_width = search.n_labels / width
    for width, max_choices in later_rounds:
        if best_choice.is_exhaustive or best_choice.makespan_s <= bound:
            break
        if labels_per_width * width > remaining_labels:
            continue
        candidate = search.search_round(width, max_choices)
        remaining_labels -= search.n_labels
        labels_per_width = search.n_labels / width
        if candidate.is_exhaustive or candidate.makespan_s < best_choice.makespan_s:
            best_choice = candidate
    return best_choice


class _BeamSearch:
    """The beam search of all rounds, and the masks of open and closing windows by interval.

    Page-outs count as open from their first interval to the end of the program.
    """

    def __init__(self, windows: TransferWindows) -> None:
        self.windows = windows
        n_intervals = len(windows.nodes) + 1
        self.closing_page_ins = _make_window_masks(
            n_intervals,
            ((page_in.last_interval, page_in.last_interval) for page_in in windows.page_ins),
        )
        self.open_page_ins = _make_window_masks(
            n_intervals,
            ((page_in.first_interval, page_in.last_interval) for page_in in windows.page_ins),
        )
        self.closing_page_outs = _make_window_masks(
            n_intervals,
            ((page_out.last_interval, page_out.last_interval) for page_out in windows.page_outs),
        )
        self.open_page_outs = _make_window_masks(
            n_intervals,
            ((page_out.first_interval, n_intervals - 1) for page_out in windows.page_outs),
        )
        self.held_by_page_outs = _make_window_masks(
            n_intervals,
            ((page_out.first_held_interval, n_intervals - 1) for page_out in windows.page_outs),
        )
        """Masks of the page-outs that hold RAM in each interval until they finish."""
        self.estimates = _Estimates(windows)
        self.n_labels = 0
        """Number of labels that the round has created."""
        self.max_choices = 1
        self.is_exhaustive = True
        """Whether the round has skipped no label so far."""

    def search_round(self, width: int, max_choices: int) -> BestTransfers:
        """Search with `width` labels per interval and `max_choices` transfers of each kind."""
        self.n_labels = 0
        self.max_choices = max_choices
        self.is_exhaustive = True
        labels = [
            _Label(0.0, 0.0, 0, 0, pending_ins=(), pending_outs=(), trail=None, transfer_s=0.0)
        ]
        for interval in range(len(self.windows.nodes)):
            check_time_limit()
            labels_by_page_ins: dict[int, list[_Label]] = {}
            for label in labels:
                for next_label in self._extend_label(label, interval):
                    self.n_labels += 1
                    _add_if_undominated(
                        labels_by_page_ins.setdefault(next_label.begun_ins, []), next_label
                    )
            labels = [label for group in labels_by_page_ins.values() for label in group]
            if len(labels) > width:
                self.is_exhaustive = False
                ranks = [
                    (
                        self.estimates.estimate_makespan(label, interval + 1),
                        -label.transfer_s,
                        label[:4],
                    )
                    for label in labels
                ]
                order = sorted(range(len(labels)), key=ranks.__getitem__)
                labels = [labels[index] for index in order[:width]]
        # Page-outs after the last computation.
        labels = [self._begin_closing_transfers(label, len(self.windows.nodes)) for label in labels]
        best_label = min(labels, key=lambda label: (max(label.core_s, label.bus_s), label[:4]))
        makespan_s = max(best_label.core_s, best_label.bus_s)
        return BestTransfers(
            makespan_s, tuple(_list_trail(best_label.trail))[::-1], self.is_exhaustive
        )

    # -- one interval ------------------------------------------------------------------------

    def _extend_label(self, label: _Label, interval: int) -> Iterator[_Label]:
        """Yield labels of the next interval: each choice of transfers, then the computation.

        Sets `is_exhaustive` to False if a limit of the round skips a choice.
        """
        # Drop the page-outs that have finished.
        if label.pending_outs and label.pending_outs[0][1] <= label.core_s:
            label = label._replace(
                pending_outs=tuple(entry for entry in label.pending_outs if entry[1] > label.core_s)
            )
        stack = [self._begin_closing_transfers(label, interval)]
        seen_states = set()
        n_extensions = 0
        while stack:
            if n_extensions == _MAX_CONTINUATIONS * self.max_choices:
                self.is_exhaustive = False
                return
            n_extensions += 1
            label = stack.pop()
            next_label = self._execute_computation(label, interval)
            yield next_label
            if label.bus_s >= next_label.core_s:
                continue
            for choice in reversed(list(self._labels_after_transfer(label, interval))):
                state = choice[:4]
                if state not in seen_states:
                    seen_states.add(state)
                    stack.append(choice)

    def _begin_closing_transfers(self, label: _Label, interval: int) -> _Label:
        """Begin the transfers whose window closes: page-outs, sources of page-ins, page-ins."""
        for page_out in _bit_indices(self.closing_page_outs[interval] & ~label.begun_outs):
            label = self._begin_page_out(label, page_out, interval)
        closing_mask = self.closing_page_ins[interval] & ~label.begun_ins
        if closing_mask:
            for page_in in _bit_indices(closing_mask):
                label = self._store_source(label, page_in, interval)
            label = self._wait_for_ram(label, interval, 0)
            for page_in in _bit_indices(closing_mask):
                label = self._begin_page_in(label, page_in, interval)
        return label

    def _labels_after_transfer(self, label: _Label, interval: int) -> Iterator[_Label]:
        """Yield the labels after one more transfer: page-ins first, each kind in index order.

        Indices of a kind ascend within an interval, which avoids permutations.
        """
        last_page_in = last_page_out = -1
        if label.trail is not None and label.trail.interval == interval:
            if label.trail.transfer.op == Op.PAGE_IN:
                last_page_in = label.trail.number
            else:
                last_page_out = label.trail.number
        for page_in in self._limit_choices(
            page_in
            for page_in in self._find_possible_page_ins(label, interval)
            if page_in > last_page_in
        ):
            waited_label = self._wait_for_ram(label, interval, self.windows.page_ins[page_in].bytes)
            yield self._begin_page_in(waited_label, page_in, interval)
        for page_out in self._limit_choices(
            page_out
            for page_out in _bit_indices(self.open_page_outs[interval] & ~label.begun_outs)
            if page_out > last_page_out
        ):
            yield self._begin_page_out(label, page_out, interval)

    def _find_possible_page_ins(self, label: _Label, interval: int) -> Iterator[int]:
        """Yield which of the first `_MAX_PAGE_INS` open page-ins can begin, by last interval."""
        for n_candidates, page_in in enumerate(
            _bit_indices(self.open_page_ins[interval] & ~label.begun_ins)
        ):
            if n_candidates == _MAX_PAGE_INS:
                self.is_exhaustive = False
                return
            source = self.windows.page_ins[page_in].page_out_index
            if (source is None or label.begun_outs >> source & 1) and self._page_in_fits(
                label, page_in, interval
            ):
                yield page_in

    def _limit_choices(self, indices: Iterator[int]) -> Iterator[int]:
        """Yield the first `max_choices` indices; set `is_exhaustive` to False if there are more."""
        for n_yielded, index in enumerate(indices):
            if n_yielded == self.max_choices:
                self.is_exhaustive = False
                return
            yield index

    def _execute_computation(self, label: _Label, interval: int) -> _Label:
        """Execute computation `interval` after the necessary waits; too little RAM is no error."""
        page_ins = self.windows.page_ins
        core_s, pending_ins, pending_outs = label.core_s, label.pending_ins, label.pending_outs
        if pending_ins and page_ins[pending_ins[0][0]].last_interval <= interval:
            core_s = max(
                [
                    core_s,
                    *(
                        end
                        for page_in, end in pending_ins
                        if page_ins[page_in].last_interval <= interval
                    ),
                ]
            )
            pending_ins = tuple(
                entry for entry in pending_ins if page_ins[entry[0]].last_interval > interval
            )
        # The window of a page-out closes where the tensor is computed again.
        closing_mask = self.closing_page_outs[interval]
        if closing_mask and pending_outs:
            core_s = max(
                [core_s, *(end for page_out, end in pending_outs if closing_mask >> page_out & 1)]
            )
            pending_outs = tuple(
                entry for entry in pending_outs if not closing_mask >> entry[0] & 1
            )
        label = label._replace(core_s=core_s, pending_ins=pending_ins, pending_outs=pending_outs)
        label = self._wait_for_ram(label, interval, 0)
        return label._replace(core_s=label.core_s + self.windows.compute_s[interval])

    # -- one transfer ------------------------------------------------------------------------

    def _store_source(self, label: _Label, index: int, interval: int) -> _Label:
        """Begin the page-out that a page-in reads, if it has not begun, and wait for it."""
        source = self.windows.page_ins[index].page_out_index
        if source is None:
            return label
        if not label.begun_outs >> source & 1:
            label = self._begin_page_out(label, source, interval)
        # A tensor has at most one transfer at a time: its page-out ends before its page-in begins.
        for page_out, end in label.pending_outs:
            if page_out == source:
                pending_outs = tuple(entry for entry in label.pending_outs if entry[0] != page_out)
                return label._replace(core_s=max(label.core_s, end), pending_outs=pending_outs)
        return label

    def _begin_page_in(self, label: _Label, index: int, interval: int) -> _Label:
        """Begin page-in `index` after the page-out that it reads; does not wait for RAM."""
        label = self._store_source(label, index, interval)
        page_in = self.windows.page_ins[index]
        end = max(label.core_s, label.bus_s) + page_in.time_s
        return label._replace(
            bus_s=end,
            begun_ins=label.begun_ins | 1 << index,
            pending_ins=tuple(sorted((*label.pending_ins, (index, end)))),
            trail=_Trail(label.trail, interval, index, Instruction(Op.PAGE_IN, page_in.tensor)),
            transfer_s=label.transfer_s + page_in.time_s,
        )

    def _begin_page_out(self, label: _Label, index: int, interval: int) -> _Label:
        """Begin page-out `index` in `interval`, after earlier transfers on the bus."""
        page_out = self.windows.page_outs[index]
        end = max(label.core_s, label.bus_s) + page_out.time_s
        return label._replace(
            bus_s=end,
            begun_outs=label.begun_outs | 1 << index,
            pending_outs=(*label.pending_outs, (index, end)),
            trail=_Trail(label.trail, interval, index, Instruction(Op.PAGE_OUT, page_out.tensor)),
            transfer_s=label.transfer_s + page_out.time_s,
        )

    # -- RAM ---------------------------------------------------------------------------------

    def _page_in_fits(self, label: _Label, index: int, interval: int) -> bool:
        """Return whether page-in `index`, begun in `interval`, fits in RAM until its use.

        RAM that unfinished page-outs hold is not counted.
        """
        if not label.pending_ins:
            return True  # the window of the page-in ensures that it fits alone
        windows, page_in = self.windows, self.windows.page_ins[index]
        free_bytes = windows.budget_bytes - page_in.bytes
        pending_page_ins = [
            windows.page_ins[pending_index]
            for pending_index, _ in label.pending_ins
            if windows.page_ins[pending_index].last_interval > interval
        ]
        pending_bytes = sum(pending_page_in.bytes for pending_page_in in pending_page_ins)
        position = interval
        for pending_page_in in pending_page_ins:
            end = min(pending_page_in.last_interval, page_in.last_interval)
            if (
                position < end
                and max(windows.min_ram_bytes[position:end]) + pending_bytes > free_bytes
            ):
                return False
            pending_bytes -= pending_page_in.bytes
            position = max(position, end)
        return True

    def _wait_for_ram(self, label: _Label, interval: int, extra_bytes: int) -> _Label:
        """Wait for page-outs until computation `interval` and `extra_bytes` fit in RAM.

        Begins further page-outs if necessary; returns a label even if all of them free too little.
        """
        page_ins, page_outs = self.windows.page_ins, self.windows.page_outs
        excess = self.windows.min_ram_bytes[interval] + extra_bytes - self.windows.budget_bytes
        for page_in, _ in label.pending_ins:
            if page_ins[page_in].last_interval > interval:
                excess += page_ins[page_in].bytes
        held_by_page_outs = self.held_by_page_outs[interval]
        for page_out, _ in label.pending_outs:
            if held_by_page_outs >> page_out & 1:
                excess += page_outs[page_out].held_bytes(interval)
        for page_out in _bit_indices(held_by_page_outs & ~label.begun_outs):
            excess += page_outs[page_out].held_bytes(interval)
        return label if excess <= 0 else self._free_ram(label, interval, excess)

    def _free_ram(self, label: _Label, interval: int, excess: int) -> _Label:
        """Wait for page-outs, begun if necessary, until `excess` bytes are free or none is left."""
        page_outs, held_by_page_outs = self.windows.page_outs, self.held_by_page_outs[interval]
        core_s, pending_outs = label.core_s, []
        for page_out, end in label.pending_outs:
            if excess > 0 and held_by_page_outs >> page_out & 1:
                excess -= page_outs[page_out].held_bytes(interval)
                core_s = max(core_s, end)
            elif end > core_s:
                pending_outs.append((page_out, end))
        label = label._replace(core_s=core_s, pending_outs=tuple(pending_outs))
        for page_out in _bit_indices(held_by_page_outs & ~label.begun_outs):
            if excess <= 0:
                break
            label = self._begin_page_out(label, page_out, interval)
            excess -= page_outs[page_out].held_bytes(interval)
            # The bus is sequential: the end of this transfer implies the end of all earlier ones.
            label = label._replace(core_s=label.bus_s, pending_outs=())
        return label


class _DueTransfer(NamedTuple):
    """A transfer in an estimate of the makespan."""

    due_interval: int
    """Interval that waits for the transfer; the number of computations if none waits."""
    first_interval: int
    """First interval in which the transfer may begin."""
    time_s: float
    """Duration on the bus [s]."""
    is_page_in: bool
    bit: int
    """Bit of the transfer in the masks of a label."""


class _Estimates:
    """Estimates of the makespan of labels: the remaining transfers are executed in due order."""

    def __init__(self, windows: TransferWindows) -> None:
        self.windows = windows
        page_ins = (
            (page_in.last_interval, page_in.first_interval, page_in.time_s)
            for page_in in windows.page_ins
        )
        page_outs = (
            (page_out.due_interval, page_out.first_interval, page_out.time_s)
            for page_out in windows.page_outs
        )
        self.transfers = sorted(
            _DueTransfer(*times, is_page_in=is_page_in, bit=1 << number)
            for is_page_in, transfers in ((False, page_outs), (True, page_ins))
            for number, times in enumerate(transfers)
        )
        self.preceding_s = [0.0, *accumulate(transfer.time_s for transfer in self.transfers)]
        """Total duration of the transfers before each one in due order, then of all [s]."""
        self.remaining_s = [0.0] * (len(self.transfers) + 1)
        """Time from the start of each transfer to the end of the program, one by one in due order
        [s]; the last value is 0."""
        for index, transfer in reversed(list(enumerate(self.transfers))):
            end_s = max(self.remaining_s[index + 1], windows.remaining_s[transfer.due_interval])
            self.remaining_s[index] = transfer.time_s + end_s
        self._due_intervals = [transfer.due_interval for transfer in self.transfers]

    def estimate_makespan(self, label: _Label, interval: int) -> float:
        """Return the estimated makespan of a label at `interval` [s]; it is no bound."""
        remaining_s = self.windows.remaining_s
        page_ins, page_outs = self.windows.page_ins, self.windows.page_outs
        core_s = label.core_s
        max_end_s = core_s + remaining_s[interval]
        for page_in, end_s in label.pending_ins:
            max_end_s = max(max_end_s, end_s + remaining_s[page_ins[page_in].last_interval])
        for page_out, end_s in label.pending_outs:
            if page_outs[page_out].due_interval >= interval:
                max_end_s = max(max_end_s, end_s + remaining_s[page_outs[page_out].due_interval])
        bus_s = max(core_s, label.bus_s)
        last_start_s = core_s + remaining_s[interval]
        begin = bisect_left(self._due_intervals, interval)
        end = min(begin + _LOOKAHEAD, len(self.transfers))
        # After the loop, the duration of the begun transfers from index `end` on, which
        # `remaining_s[end]` counts too.
        counted_twice_s = label.transfer_s - self.preceding_s[begin]
        for due_interval, first_interval, time_s, is_page_in, bit in self.transfers[begin:end]:
            if (label.begun_ins if is_page_in else label.begun_outs) & bit:
                counted_twice_s -= time_s
                continue
            if first_interval > interval:
                bus_s = max(bus_s, last_start_s - remaining_s[first_interval])
            bus_s += time_s
            max_end_s = max(max_end_s, bus_s + remaining_s[due_interval])
        return max(max_end_s, bus_s - counted_twice_s + self.remaining_s[end])


def _make_window_masks(n_intervals: int, windows: Iterable[tuple[int, int]]) -> list[int]:
    """Return the bit mask of the (first, last) windows around each interval, ends included."""
    masks = [0] * n_intervals
    for bit, (first, last) in enumerate(windows):
        for interval in range(first, last + 1):
            masks[interval] |= 1 << bit
    return masks


def _add_if_undominated(group: list[_Label], label: _Label) -> None:
    """Add a label to a group unless a label there dominates it; remove those that it dominates."""
    if any(_dominates(existing, label) for existing in group):
        return
    group[:] = [existing for existing in group if not _dominates(label, existing)]
    group.append(label)


def _dominates(label: _Label, other: _Label) -> bool:
    """Return whether `label` is no later than `other` and has begun at least its page-outs.

    Both are of one interval and have begun the same page-ins.
    """
    if (
        label.core_s > other.core_s
        or label.bus_s > other.bus_s
        or other.begun_outs & ~label.begun_outs
    ):
        return False
    if any(
        entry[1] > other_entry[1]
        for entry, other_entry in zip(label.pending_ins, other.pending_ins, strict=True)
    ):
        return False
    if not label.pending_outs:
        return True
    # A page-out that is pending in `label` must end no later than in `other`; if it is not pending
    # in `other`, no later than the core time of `other`.
    ends = dict(other.pending_outs)
    return all(end_s <= ends.get(page_out, other.core_s) for page_out, end_s in label.pending_outs)


def _list_trail(trail: _Trail | None) -> Iterator[tuple[int, Instruction]]:
    """Yield (interval, transfer) of each transfer of a trail, latest first."""
    while trail is not None:
        yield trail.interval, trail.transfer
        trail = trail.previous


def _bit_indices(mask: int) -> Iterator[int]:
    """Yield the indices of the bits that are 1 in `mask`, lowest first."""
    while mask:
        lowest_bit = mask & -mask
        yield lowest_bit.bit_length() - 1
        mask ^= lowest_bit
