"""Checkpoints between segments of the forward pass, for graphs of thousands of nodes.

An unrolled recurrence is a chain of thousands of nodes. Repair of keep-all, which recomputes tensor
by tensor, is slow for such a chain and ends far above the minimum RAM. Here the forward pass is
divided into segments. The tensors that later segments read, and those of the last segment, are
kept. The other tensors of a segment that the backward pass needs are recomputed together, when the
backward pass first reads one of them.

References
----------
Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, section 4
(arXiv:1604.06174): checkpoints between segments of a chain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Final

from poetmodel.clock import check_time_limit, limit_time, now_s, time_left_s
from poetmodel.errors import TimeLimitError
from poetmodel.graph import Phase, checkpoint_all_peak_bytes
from poetmodel.heuristics.penalties import WORST, PenalizedObjective
from poetmodel.heuristics.repair import Repair
from poetmodel.heuristics.restorations import RECOMPUTE, Restoration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

MIN_NODES: Final = 200
"""Minimum number of nodes of a graph that is divided; repair of smaller graphs is fast and
better."""
REPAIR_TIME_RATIO: Final = 4.0
"""Maximum time for repairs, as a multiple of the time for all segmentations."""
SEARCH_TIME_RATIO: Final = 0.5
"""Fraction of the remaining time for segmentations and repairs. The rest is for the conversion to a
schedule, which takes as long as several segmentations for graphs of ten thousand nodes."""
MAX_PEAKS: Final = 8
"""Maximum number of peaks tried by bisection if RAM is minimized."""
MAX_SEGMENTS: Final = 256
"""Maximum number of segments."""
FIRST_SEGMENTS_LOG2: Final = 4
"""Binary logarithm of the first number of segments."""
START_RANGE_RATIO: Final = 0.25
"""Maximum distance of a segment's start from an equal division of the bytes, as a fraction of the
bytes of an equal segment.

If no node begins within this distance, the segment begins at the next node, if there is one."""


class SegmentSearch:
    """The search over numbers of segments, and the repair of the best segmentation.

    The best schedule has the lowest `Score`. Per-stage constraints and makespans are not checked.
    A time limit of the context ends `find_best` with an error, if there is no schedule yet.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.objective = PenalizedObjective(problem)
        self.best: PartialSchedule | None = None
        self.best_score = WORST
        self.min_peak_restorations: list[Restoration] = []
        """Restorations of the partial schedule with the smallest peak; empty for keep-all."""
        self.min_peak_bytes = checkpoint_all_peak_bytes(problem.graph)
        self.repair_s = 0.0
        """Maximum time for repairs [s], set when segmentations are evaluated."""
        self._segmentations = _segmentations(problem)
        self.has_tried_repair = False

    @staticmethod
    def applies_to(problem: Problem) -> bool:
        """Return whether a graph has `MIN_NODES` nodes, and keep-all does not fit or RAM counts."""
        keep_all_bytes = checkpoint_all_peak_bytes(problem.graph)
        is_keep_all_best = keep_all_bytes <= problem.usable_ram_bytes and problem.objective.is_sum
        return len(problem.graph.nodes) >= MIN_NODES and not is_keep_all_best

    def schedule(self) -> Schedule | None:
        """Return the best schedule; None without one."""
        return None if self.best is None else self.best.schedule()

    def find_first(self) -> None:
        """Evaluate the first segmentation only; `find_best` continues with the others."""
        with self._limit_time():
            self._evaluate(islice(self._segmentations, 1))

    def find_best(self) -> None:
        """Evaluate all segmentations; improve the best if none fits, or if RAM is minimized."""
        with self._limit_time():
            self._evaluate(self._segmentations)
        if self.best is None or not self.problem.objective.is_sum:
            self.improve()

    def _evaluate(self, segmentations: Iterable[list[Restoration]]) -> None:
        """Store the best of the segmentations; their time permits repairs."""
        started_s = now_s()
        for restorations in segmentations:
            self._store_if_best(self.objective.make_partial(restorations))
        self.repair_s += REPAIR_TIME_RATIO * (now_s() - started_s)

    def improve(self) -> None:
        """Repair the best segmentation, or without one that of the smallest peak; once."""
        if self.has_tried_repair or not self.min_peak_restorations:
            return
        self.has_tried_repair = True
        until_s = now_s() + self.repair_s
        with self._limit_time():
            if not self.problem.objective.is_sum:
                self._minimize_peak(until_s)
            else:
                best = self.best
                start = self.min_peak_restorations if best is None else best.restorations()
                self._repair(start, self.problem.usable_ram_bytes, until_s)

    @contextmanager
    def _limit_time(self) -> Iterator[None]:
        """Limit the block to `SEARCH_TIME_RATIO` of the time left; raise only without `best`."""
        try:
            with limit_time(SEARCH_TIME_RATIO * time_left_s()):
                yield
        except TimeLimitError:
            if self.best is None:
                raise

    def _store_if_best(self, partial: PartialSchedule) -> None:
        """Store the best schedule within limits, and the restorations of the smallest peak."""
        peak_bytes, score = int(partial.peaks().max()), self.objective.score(partial)
        if peak_bytes < self.min_peak_bytes:
            self.min_peak_restorations, self.min_peak_bytes = partial.restorations(), peak_bytes
        fits = peak_bytes <= self.problem.usable_ram_bytes and score.excess == 0
        if fits and score < self.best_score:
            self.best, self.best_score = partial, score

    def _repair(self, start: list[Restoration], limit_bytes: int, until_s: float) -> bool:
        """Repair `start` within `limit_bytes` by `until_s`, store a new best; return if it fits."""
        partial = self.objective.make_partial(start)
        prices = self.objective.prices(0.0)
        repair = Repair(self.problem, partial, prices, limit_bytes, until_s=until_s)
        is_fit = repair.fit()
        if is_fit and self.problem.objective.is_sum:
            repair.drop_unneeded()
        if is_fit:
            self._store_if_best(partial)
        return is_fit

    def _minimize_peak(self, until_s: float) -> None:
        """Bisect for the smallest peak, by at most `MAX_PEAKS` repairs."""
        low = self.problem.floor.bytes
        for _ in range(MAX_PEAKS):
            if low >= self.min_peak_bytes or now_s() > until_s:
                break
            middle = (low + self.min_peak_bytes) // 2
            if not self._repair(self.min_peak_restorations, middle, until_s):
                low = middle + 1


def _segmentations(problem: Problem) -> Iterator[list[Restoration]]:
    """Yield the recomputations of 16, 8, 32, 4, ... segments: 16 is best most often."""
    graph = problem.graph
    forward_count = next(
        (k for k, node in enumerate(graph.nodes) if node.phase == Phase.BACKWARD), 0
    )
    if not problem.recompute:
        return
    powers = range(1, min(MAX_SEGMENTS, forward_count).bit_length())
    for power in sorted(powers, key=lambda power: abs(power - FIRST_SEGMENTS_LOG2)):
        check_time_limit()
        starts = _segment_starts(problem, forward_count, 2**power)
        yield _segment_recomputations(problem, [0, *starts, forward_count])


def _segment_starts(problem: Problem, forward_count: int, count: int) -> list[int]:
    """Return the first nodes of at most `count` segments, without the first's, ascending.

    Segments make about equal bytes; each starts where few bytes are read across its start.
    """
    graph = problem.graph
    produced_bytes = [0, *accumulate(graph.output_bytes[:forward_count])]
    byte_differences = [0] * (forward_count + 1)
    for i, size in enumerate(graph.tensor_bytes):
        readers = [k for k in graph.users_of[i] if k < forward_count]
        if graph.node_of[i] < forward_count and readers:
            byte_differences[graph.node_of[i] + 1] += size
            byte_differences[max(readers) + 1] -= size
    crossing_bytes = list(accumulate(byte_differences))
    starts: list[int] = []
    for segment in range(1, count):
        target_bytes, range_bytes = (
            produced_bytes[-1] * segment / count,
            START_RANGE_RATIO * produced_bytes[-1] / count,
        )
        first_start = bisect_left(produced_bytes, target_bytes - range_bytes)
        end_start = min(
            max(bisect_right(produced_bytes, target_bytes + range_bytes), first_start + 1),
            forward_count,
        )
        candidates = [
            (crossing_bytes[k], abs(produced_bytes[k] - target_bytes), k)
            for k in range(first_start, end_start)
        ]
        start = min(candidates)[2] if candidates else 0
        if start > (starts[-1] if starts else 0):
            starts.append(start)
    return starts


def _segment_recomputations(problem: Problem, bounds: list[int]) -> list[Restoration]:
    """Return the recomputations of all segments except the last one.

    A segment's tensors that the backward pass reads are recomputed together, in the first backward
    stage that reads one. `bounds` ends with the end of the forward pass.
    """
    graph = problem.graph
    segment_of = [
        segment for segment, (first, end) in enumerate(pairwise(bounds)) for _ in range(first, end)
    ]
    forward_count, last_segment = len(segment_of), len(bounds) - 2
    is_kept = [
        k < forward_count
        and any(segment_of[user] != segment_of[k] for user in users if user < forward_count)
        for k, users in zip(graph.node_of, graph.users_of, strict=True)
    ]
    first_reads: list[int | None] = [None] * last_segment
    """By segment: the first backward stage that reads a tensor to recompute, or None."""
    read_nodes: list[list[int]] = [[] for _ in range(last_segment)]
    for t in range(forward_count, len(graph.nodes)):
        for i in graph.inputs_of[t]:
            k = graph.node_of[i]
            if k < bounds[last_segment] and not is_kept[i] and problem.may_recompute(k):
                segment = segment_of[k]
                first_reads[segment] = t if first_reads[segment] is None else first_reads[segment]
                read_nodes[segment].append(k)
    recomputations: list[Restoration] = []
    for stage, pending_nodes in zip(first_reads, read_nodes, strict=True):
        recomputed_nodes: set[int] = set()
        while stage is not None and pending_nodes:
            k = pending_nodes.pop()
            if k in recomputed_nodes or stage > graph.last_stages[k]:
                continue
            recomputed_nodes.add(k)
            pending_nodes += [
                j
                for i in graph.inputs_of[k]
                for j in (graph.node_of[i],)
                if not is_kept[i] and problem.may_recompute(j) and segment_of[j] == segment_of[k]
            ]
        recomputations += [
            Restoration(stage, k, RECOMPUTE) for k in sorted(recomputed_nodes) if stage is not None
        ]
    return recomputations
