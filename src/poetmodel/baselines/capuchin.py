"""Capuchin: swap while transfers are hidden, then swap or recompute, whichever stalls less."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.baselines.homes import all_in_ram
from poetmodel.baselines.paging import StorageSpace, execute_gaps, gaps_of, within_budget
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.schedule import simulate
from poetmodel.time_limit import check_time_limit
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.baselines.paging import Gap
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


@all_in_ram
def capuchin(problem: Problem) -> Schedule:
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

    Interpretations. The paper takes one amount of memory to save; here every stage must fit. Its
    page-in is triggered early and adjusted by feedback; a schedule pages in at the stage of use,
    and a plan moves transfers. The paper's assumption that transfers run beside computing is kept
    on devices where they do not, and transfers are not queued behind each other. A recomputation
    that does not fit in its stage becomes a swap if that is allowed; else more tensors leave that
    stage. Inputs recomputed for a tensor are not kept for others ("collective recomputation").

    Takes O(gaps) choices, each of which looks at every gap and what is recomputed for it.
    """
    return _Capuchin(problem).run()


class _Capuchin:
    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem = problem
        self.graph = graph
        self.sizes = graph.tensor_bytes
        self.gaps = [gap for gap in gaps_of(graph) if self.sizes[gap.tensor]]
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

    def run(self) -> Schedule:
        self._swap_what_is_hidden()
        while True:
            self._choose_until_it_fits()
            schedule = execute_gaps(self.problem, self.pages)
            if not self._repair(schedule):
                return within_budget(self.problem, schedule)

    # -- choosing -------------------------------------------------------------------------------

    def _swap_what_is_hidden(self) -> None:
        free = {gap: self._free_time_s(gap) for gap in self.gaps}
        for gap in sorted(self.gaps, key=lambda gap: -free[gap]):
            check_time_limit()
            if free[gap] < 0 or self.excess.max() <= 0:
                break
            if self._is_crowded(gap) and self.storage.takes(gap.tensor):
                self._take(gap, page=True)

    def _choose_until_it_fits(self) -> None:
        while self.excess.max() > 0:
            best: tuple[float, Gap, bool] | None = None
            for gap in self.gaps:
                check_time_limit()
                if gap in self.pages or not self._is_crowded(gap):
                    continue
                swap_s = max(0.0, -self._free_time_s(gap))
                overhead_s = min(swap_s, self._recompute_s(gap)) if swap_s > 0 else 0.0
                if overhead_s == math.inf:
                    continue
                saving = self.sizes[gap.tensor] / overhead_s if overhead_s > 0 else math.inf
                if best is None or saving > best[0]:
                    best = (saving, gap, swap_s == overhead_s)
            if best is None:
                worst = int(self.excess.argmax())
                raise MethodNotApplicableError(
                    f"at {self.graph.nodes[worst].name!r} {format_bytes(int(self.excess[worst]))} "
                    "more than tensors may use are needed, and no tensor is left to swap or "
                    "recompute"
                )
            self._take(best[1], page=best[2])

    def _is_crowded(self, gap: Gap) -> bool:
        return bool(self.excess[gap.before + 1 : gap.after].max() > 0)

    def _take(self, gap: Gap, *, page: bool) -> None:
        if gap not in self.pages:
            self.excess[gap.before + 1 : gap.after] -= self.sizes[gap.tensor]
        self.pages[gap] = page
        if page:
            self.storage.write(gap.tensor)

    def _free_time_s(self, gap: Gap) -> float:
        """Return the free time of a gap [s], minus infinity without space on storage."""
        if not self.storage.takes(gap.tensor):
            return -math.inf
        table = self.problem.table
        out_s = 0.0 if gap.tensor in self.graph.on_aux else table.page_out_time_s[gap.tensor]
        back_s = self.end_s[gap.after - 1] - table.page_in_time_s[gap.tensor]
        return back_s - (self.end_s[gap.before] + out_s)

    def _recompute_s(self, gap: Gap) -> float:
        """Return how long recomputing a tensor for its back-access takes, by the plan [s]."""
        graph, problem = self.graph, self.problem
        t = gap.after
        total_s = 0.0
        wanted, met = [gap.tensor], {gap.tensor}
        computed: set[int] = set()
        while wanted:
            k = graph.node_of[wanted.pop()]
            if k in computed:
                continue
            if not problem.may_recompute(k):
                return math.inf
            computed.add(k)
            total_s += problem.table.compute_time_s[k]
            for p in graph.inputs_of[k]:
                if p in met or self._is_in_ram(p, t):
                    continue
                met.add(p)
                if p in self.storage.stored:
                    total_s += problem.table.page_in_time_s[p]
                else:
                    wanted.append(p)
        return total_s

    def _is_in_ram(self, p: int, t: int) -> bool:
        """Return whether stage `t` has tensor `p` by the plan, whatever else it recomputes."""
        users = self.graph.users_of[p]
        if not users or users[-1] < t:
            return False
        return not any(
            gap in self.pages for gap in self.around.get(p, ()) if gap.before < t < gap.after
        )

    # -- recomputations that do not fit ------------------------------------------------------------

    def _repair(self, schedule: Schedule) -> bool:
        """Change the plan where recomputations do not fit; return whether any did not."""
        usable = self.problem.usable_ram_bytes
        peaks: dict[int, int] = {}
        for point in simulate(self.graph, None, schedule).curve:
            peaks[point.stage] = max(point.ram_bytes, peaks.get(point.stage, 0))
        over = {t: peak - usable for t, peak in peaks.items() if peak > usable}
        for t, over_bytes in over.items():
            recomputed = [gap for gap, page in self.pages.items() if gap.after == t and not page]
            swappable = next((gap for gap in recomputed if self.storage.takes(gap.tensor)), None)
            if swappable is not None:
                self._take(swappable, page=True)
            else:
                self.excess[t] += over_bytes
        return bool(over)
