"""Capuchin: swap or recompute each tensor in its gaps, by what that holds up."""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.homes import best_homes
from poetmodel.baselines.paging import (
    Gap,
    GapExecution,
    Overhead,
    StorageSpace,
    eviction_costs,
    execute_gaps,
    gaps_of,
    relieved,
    within_budget,
)
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.problem import DeadlineCounts, Problem
from poetmodel.schedule import Schedule, simulate
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

ROUNDS: Final = 6
"""How often more tensors are kept that were recomputed for others."""


def capuchin(problem: Problem, rule: str = "", *, refined: bool = True) -> Schedule:
    """Swap by free time while transfers are hidden, then swap or recompute by saving per second.

    Candidates are the gaps between two accesses of a tensor that cross the peak: a stage that does
    not fit in RAM. On the timeline of keep-all the *free time* of a gap is the start of its
    back-access less page-in time, less the end of its evicted-access plus page-out time. Where it
    is not negative, computing hides both transfers.

    1. Gaps of free time 0 or more are swapped, the longest free time first, until all stages fit.
    2. Then the tensor leaves in the gap of most memory saving per second (MSPS), bytes over
       overhead. The overhead of a swap is the time that is not hidden. The overhead of a
       recomputation is the compute time of all that must be recomputed for it, by the plan so far.
       The lesser of the two decides how the tensor leaves RAM, a swap where they are equal.

    The `rule` says what is charged; without one, the best schedule of all three is taken.

    - ``published``: as above, on every device, and transfers are not queued behind each other.
    - ``time``: where transfers block the core, the free time of a gap is minus its transfer time;
      where a deadline counts compute only, transfers take none. Where they overlap with computing,
      the channel is busy in a gap for the transfers that the plan has there so far: they begin
      right after their evicted-access, and end right before their back-access.
    - ``energy``: overheads are energies, and the free time of a gap is minus that of its transfers.

    The last two charge no page-out where the plan has written the tensor before. If `refined`, each
    of them runs twice, and the better schedule is taken: the saving of a gap is all bytes of the
    tensor, or no more than what a stage in the gap is above the budget.

    Interpretations. The paper takes one amount of memory to save; here every stage must fit. Its
    page-in is triggered early and adjusted by feedback; a schedule pages in at the stage of use,
    and a plan moves transfers. A recomputation that does not fit in its stage becomes a swap if
    that is allowed; else more tensors leave that stage.

    If `refined`, tensors that a stage recomputes on the way to another one stay in RAM until their
    own back-access, the earliest first, as far as there is room in all stages until then. The paper
    keeps the last ones while memory lasts ("collective recomputation"). The choices above do not
    foresee this.

    Takes O(gaps) choices, each of which looks at every gap and what is recomputed for it.
    """
    rules = [Overhead(rule)] if rule else list(Overhead)
    searches = [partial(_searched, rule=each, collective=refined) for each in rules]
    if refined:
        adapted = (each for each in rules if each != Overhead.PUBLISHED)
        searches += [partial(_searched, rule=each, needed=True) for each in adapted]
    return best_homes(problem, searches)


def _searched(
    problem: Problem, rule: Overhead, *, collective: bool = True, needed: bool = False
) -> Schedule:
    return _Capuchin(problem, rule, needed=needed).run(collective=collective)


class _Capuchin:
    def __init__(self, problem: Problem, rule: Overhead, *, needed: bool = False) -> None:
        graph = problem.graph
        self.problem = problem
        self.needed = needed
        """Whether a gap saves no more than what a stage is above the budget."""
        self.graph = graph
        self.sizes = graph.tensor_bytes
        self.gaps = [gap for gap in gaps_of(graph, overwritten=True) if self.sizes[gap.tensor]]
        self.around: dict[int, list[Gap]] = {}
        for gap in self.gaps:
            self.around.setdefault(gap.tensor, []).append(gap)
        self.excess: NDArray[np.int64] = (
            np.array(checkpoint_all_profile(graph)) - problem.usable_ram_bytes
        )
        """What each stage is above the budget by the plan so far, shape (stages,) [B]."""
        self.pages: dict[Gap, bool] = {}
        """The plan: gaps out of RAM, true where the tensor is swapped."""
        self.storage = StorageSpace(problem)
        self.end_s = list(accumulate(problem.table.compute_time_s))
        self.rule = rule
        counted = DeadlineCounts.OVERLAP if rule == Overhead.PUBLISHED else problem.deadline_counts
        self.overlaps = rule != Overhead.ENERGY and counted == DeadlineCounts.OVERLAP
        """Whether computing hides transfers."""
        self.computing, self.paging_in, self.paging_out = eviction_costs(problem, rule)
        self.booked: list[tuple[float, float]] = []
        """When the channel is busy by the plan so far, from and to [s]."""

    def run(self, *, collective: bool) -> Schedule:
        self._swap_what_is_hidden()
        while True:
            self._choose_until_it_fits()
            schedule = execute_gaps(self.problem, self.pages)
            if not self._repair(schedule):
                break
        within_budget(self.problem, schedule)
        return self._collected(schedule) if collective else schedule

    # -- choosing -------------------------------------------------------------------------------

    def _swap_what_is_hidden(self) -> None:
        free = {gap: self._free(gap) for gap in self.gaps}
        for gap in sorted(self.gaps, key=lambda gap: -free[gap]):
            check_time_limit()
            if free[gap] < 0 or self.excess.max() <= 0:
                break
            hidden = self._free(gap) >= 0  # still, as the channel may be busy by now
            crowded = self.excess[relieved(self.graph, gap)].max() > 0
            if hidden and crowded and self.storage.takes(gap.tensor):
                self._take(gap, page=True)

    def _choose_until_it_fits(self) -> None:
        while self.excess.max() > 0:
            best: tuple[float, Gap, bool] | None = None
            crowded = [0, *accumulate((self.excess > 0).tolist())]
            for gap in self.gaps:
                check_time_limit()
                first = relieved(self.graph, gap).start
                if crowded[gap.after] == crowded[first] or gap in self.pages:
                    continue
                saved_bytes = self._saved_bytes(gap)
                swap = max(0.0, -self._free(gap))
                least = min(swap, self.computing[self.graph.node_of[gap.tensor]])
                if best is not None and saved_bytes <= best[0] * least:
                    continue  # nor with what else must be recomputed
                most = swap if best is None or not best[0] else min(swap, saved_bytes / best[0])
                overhead = min(swap, self._recomputation(gap, most)) if swap > 0 else 0.0
                if overhead == math.inf:
                    continue
                saving = saved_bytes / overhead if overhead > 0 else math.inf
                if best is None or saving > best[0]:
                    best = (saving, gap, swap == overhead)
            if best is None:
                worst = int(self.excess.argmax())
                raise MethodNotApplicableError(
                    f"at {self.graph.nodes[worst].name!r} {format_bytes(int(self.excess[worst]))} "
                    "more than tensors may use are needed, and no tensor is left to swap or "
                    "recompute"
                )
            self._take(best[1], page=best[2])

    def _saved_bytes(self, gap: Gap) -> int:
        size = self.sizes[gap.tensor]
        if not self.needed:
            return size
        return min(size, int(self.excess[relieved(self.graph, gap)].max()))

    def _take(self, gap: Gap, *, page: bool) -> None:
        if gap not in self.pages:
            self.excess[gap.before + 1 : gap.after] -= self.sizes[gap.tensor]
            if relieved(self.graph, gap).start == gap.before:
                self.excess[gap.before] -= self.graph.shared_bytes_of[gap.before][gap.tensor]
        self.pages[gap] = page
        if page and self.overlaps and self.rule != Overhead.PUBLISHED:
            begin, end = self.end_s[gap.before], self.end_s[gap.after - 1]
            out_s, in_s = self._transfers(gap)
            self.booked += [(begin, begin + out_s), (end - in_s, end)]
        if page:
            self.storage.write(gap.tensor)

    def _transfers(self, gap: Gap) -> tuple[float, float]:
        """Return the costs of page-out and page-in of a gap: seconds or joules."""
        i = gap.tensor
        once = self.graph.on_aux if self.rule == Overhead.PUBLISHED else self.storage.stored
        return 0.0 if i in once else self.paging_out[i], self.paging_in[i]

    def _free(self, gap: Gap) -> float:
        """Return the free time of a gap [s]; minus infinity without space on storage.

        Where nothing is hidden, it is minus what the transfers cost.
        """
        if not self.storage.takes(gap.tensor):
            return -math.inf
        transfers = sum(self._transfers(gap))
        if not self.overlaps:
            return -transfers
        begin, end = self.end_s[gap.before], self.end_s[gap.after - 1]
        busy_s = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.booked)
        return end - begin - busy_s - transfers

    def _recomputation(self, gap: Gap, most: float) -> float:
        """Return the cost, by the plan, of recomputing a tensor for its back-access.

        It is infinite where that is beyond `most`.
        """
        graph, problem = self.graph, self.problem
        t = gap.after
        total = 0.0
        wanted, met = [gap.tensor], {gap.tensor}
        computed: set[int] = set()
        while wanted:
            k = graph.node_of[wanted.pop()]
            if k in computed:
                continue
            if not problem.may_recompute(k):
                return math.inf
            computed.add(k)
            total += self.computing[k]
            if total > most:
                return math.inf
            for p in graph.inputs_of[k]:
                if p in met or self._is_in_ram(p, t):
                    continue
                met.add(p)
                if p in self.storage.stored:
                    total += self.paging_in[p]
                else:
                    wanted.append(p)
        return total

    def _is_in_ram(self, p: int, t: int) -> bool:
        """Whether stage `t` has tensor `p` by the plan, whatever else it recomputes."""
        users = self.graph.users_of[p]
        if not users or users[-1] < t:
            return False
        return not any(
            gap in self.pages for gap in self.around.get(p, ()) if gap.before < t < gap.after
        )

    # -- collective recomputation ---------------------------------------------------------------

    def _collected(self, schedule: Schedule) -> Schedule:
        """Return the plan's schedule with recomputed tensors kept where there is room.

        What is kept spares recomputations, and leaves room for more in another round.
        """
        stays, tight = frozenset[tuple[int, int]](), set[int]()
        for _ in range(ROUNDS):
            room = self.problem.usable_ram_bytes - self._peaks(schedule)
            execution = _Collective(self.problem, self.pages, stays, room, tight)
            longer = execution.run()
            excess = self._peaks(longer) - self.problem.usable_ram_bytes
            over = set(np.flatnonzero(excess > 0).tolist())
            if over - tight:
                tight |= over
            elif over or execution.stays == stays:
                break
            else:
                schedule, stays = longer, execution.stays
        return schedule

    def _peaks(self, schedule: Schedule) -> NDArray[np.int64]:
        """Return the peak of each stage, shape (stages,) [B]."""
        peaks = np.zeros(len(self.graph.nodes), dtype=np.int64)
        for point in simulate(self.graph, None, schedule).curve:
            peaks[point.stage] = max(point.ram_bytes, peaks[point.stage])
        return peaks

    # -- recomputations that do not fit ------------------------------------------------------------

    def _repair(self, schedule: Schedule) -> bool:
        """Change the plan where recomputations do not fit; return whether any did not."""
        excess = self._peaks(schedule) - self.problem.usable_ram_bytes
        over = {int(t): int(excess[t]) for t in np.flatnonzero(excess > 0)}
        for t, over_bytes in over.items():
            recomputed = [gap for gap, page in self.pages.items() if gap.after == t and not page]
            swappable = next((gap for gap in recomputed if self.storage.takes(gap.tensor)), None)
            if swappable is not None:
                self._take(swappable, page=True)
            else:
                self.excess[t] += over_bytes
        return bool(over)


class _Collective(GapExecution):
    """Keeps what a stage recomputes until its next use, as far as each stage has room for it."""

    def __init__(
        self,
        problem: Problem,
        pages: Mapping[Gap, bool],
        stays: Collection[tuple[int, int]],
        room: NDArray[np.int64],
        tight: Collection[int],
    ) -> None:
        super().__init__(problem, pages)
        self.stays = frozenset(stays)
        """Tensors that stay after a stage that recomputes them: stage, tensor."""
        self.room, self.tight = room, tight
        """What is left in each stage [B]; stages whose recomputation itself needs that room."""
        self.until: dict[int, int] = {}
        """The stage of the next use of each tensor that stays."""

    def retains(self, i: int) -> bool:
        return super().retains(i) or self.until.get(i, -1) > self.stage

    def _missing(self) -> tuple[set[int], set[int]]:
        computed, paged = super()._missing()
        t = self.stage
        again = [i for k in computed - {t} for i in self.graph.outputs_of[k] if self.is_awaited(i)]
        next_use = {i: next(k for k in self.graph.users_of[i] if k > t) for i in again}
        for i in sorted(again, key=lambda i: (next_use[i], i)):
            span = self.room[t + (t not in self.tight) : next_use[i]]
            if (t, i) not in self.stays:
                if span.min(initial=self.sizes[i]) < self.sizes[i]:
                    continue
                span -= self.sizes[i]
                self.stays |= {(t, i)}
            self.until[i] = next_use[i]
        return computed, paged
