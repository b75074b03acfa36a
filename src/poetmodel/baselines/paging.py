"""Methods that page: LRU, `offload_all`, `zero_offload` and Capuchin, and what all of them share.

A *gap* is a tensor between two uses that are not in adjacent stages. A method that decides
beforehand chooses the gaps in which a tensor is out of RAM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.baselines.engine import FORWARD, StagedExecution
from poetmodel.baselines.homes import all_in_ram, all_on_storage
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, checkpoint_all_profile
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.schedule import Schedule, simulate
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


@all_on_storage
def lru_paging(problem: Problem) -> Schedule:
    """Page out the least recently used tensor whenever RAM is short, page in what is read.

    A tensor is used when a node computes or reads it; among those of the same step the lowest
    number goes first. Tensors do not change, so each is written once, as far as the storage limit
    allows. Evicted again it is dropped, as a clean page is. Tensors without a further user are
    freed at once, those of 0 bytes stay. Takes O(n) evictions of O(n) candidates.
    """
    return _LeastRecentlyUsed(problem).run()


def offload_all(problem: Problem) -> Schedule:
    """Page out every tensor that is saved for the backward pass, page it in at each use there.

    Saved is what input, forward and loss nodes compute and backward or update nodes read. It stays
    in RAM until its last use before the backward pass. It is paged in for each node that reads it
    there, and stays no longer than the next node if that one reads it too. The method looks at no
    budget. Gradients stay in RAM from the first to the last use, as do tensors of 0 bytes. Samples
    that lie on storage from the start are not written. Takes linear time.
    ``torch.autograd.graph.save_on_cpu`` does the same with what autograd saves.

    The home of all state is storage, with the rule of `zero_offload`.
    """
    if not problem.can_page:
        raise MethodNotApplicableError(
            "it pages every saved tensor out, and the problem allows no paging"
        )
    if all(node.phase in FORWARD or node.is_state for node in problem.graph.nodes):
        raise MethodNotApplicableError(
            "it pages what the backward pass reads, and the graph has no backward nodes"
        )

    @all_on_storage
    def schedule(plain: Problem) -> Schedule:
        graph = plain.graph
        forward = [node.phase in FORWARD for node in graph.nodes]
        saved = {
            gap: True
            for gap in gaps_of(graph)
            if graph.tensor_bytes[gap.tensor]
            and forward[graph.node_of[gap.tensor]]
            and not forward[gap.after]
        }
        return execute_gaps(plain, saved | _between_uses(problem, graph))

    return within_budget(problem, schedule(problem))


def zero_offload(problem: Problem) -> Schedule:
    """Keep all state on storage, read it for each use and write it back; keep activations in RAM.

    The home of all state is storage: parameters, moments and running statistics. Each is read when
    its first reader needs it, stays no longer than the next node if that one reads it too, and is
    read again for each later use. Its update writes it back. Everything else is kept to its last
    use. The method looks at no budget. Takes linear time.

    ZeRO-Offload keeps master copies and moments in the memory of the host, updates them there, and
    moves gradients out as soon as they are made. Here storage takes the place of the host, and it
    cannot compute: so moments come in for the update, and a gradient is used up by it in RAM. When
    updates run is for the graph to say. Without state in the graph everything is kept.
    """

    @all_on_storage
    def schedule(plain: Problem) -> Schedule:
        return execute_gaps(plain, _between_uses(problem, plain.graph))

    return within_budget(problem, schedule(problem))


def _between_uses(problem: Problem, graph: Graph) -> dict[Gap, bool]:
    """Return the gaps of state that come after a use of it, all paged."""
    state = frozenset(problem.graph.state_tensors)
    return {
        gap: True
        for gap in gaps_of(graph)
        if gap.tensor in state and gap.before != graph.node_of[gap.tensor]
    }


class StorageSpace:
    """Which tensors have a copy on storage, and how much space is left there."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.sizes = graph.tensor_bytes
        self.can_page = problem.can_page
        self.stored = set(graph.on_aux) if problem.can_page else set[int]()
        limit = problem.aux_limit_bytes
        self.left_bytes = math.inf if limit is None else limit

    def takes(self, i: int) -> bool:
        """Return whether tensor `i` has a copy on storage, or space for one."""
        return i in self.stored or (self.can_page and self.sizes[i] <= self.left_bytes)

    def write(self, i: int) -> None:
        """Write tensor `i`, unless it has a copy."""
        if i not in self.stored:
            self.stored.add(i)
            self.left_bytes -= self.sizes[i]


def transfer_costs(problem: Problem) -> tuple[Sequence[float], Sequence[float]]:
    """Return what page-in and page-out of each tensor cost: energy, or time if that is minimized.

    Time in the deadline's meaning: none where it counts compute only.
    """
    if problem.minimize != Quantity.TIME:
        energy = problem.energy.coefficients
        return energy.page_in, energy.page_out
    if problem.deadline_counts == DeadlineCounts.COMPUTE:
        nothing = (0.0,) * len(problem.graph.tensors)
        return nothing, nothing
    return problem.table.page_in_time_s, problem.table.page_out_time_s


class _LeastRecentlyUsed(StagedExecution):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.graph, problem.usable_ram_bytes)
        self.storage = StorageSpace(problem)
        self.steps = 0
        self.last_use = [0] * len(self.sizes)

    def victim(self, k: int) -> int | None:
        can_go = [i for i in self.candidates(k) if self.storage.takes(i)]
        victim = min(can_go, key=lambda i: self.last_use[i], default=None)
        if victim is not None:
            self.storage.write(victim)
        return victim

    def pages_in(self, i: int) -> bool:
        return i in self.storage.stored

    def compute(self, k: int) -> None:
        super().compute(k)
        self.steps += 1
        for i in (*self.graph.inputs_of[k], *self.graph.outputs_of[k]):
            self.last_use[i] = self.steps


# -- methods that decide beforehand ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """A tensor between two uses that are not in adjacent stages."""

    tensor: int
    before: int
    """The node that computes or reads it before the gap."""
    after: int
    """The next node that reads it."""


def gaps_of(graph: Graph) -> list[Gap]:
    """Return every gap of a graph, by tensor and stage."""
    return [
        Gap(i, a, b)
        for i, users in enumerate(graph.users_of)
        for a, b in pairwise((graph.node_of[i], *users))
        if b > a + 1
    ]


def execute_gaps(problem: Problem, pages: Mapping[Gap, bool]) -> Schedule:
    """Return the schedule in which tensors are out of RAM in some gaps, whatever RAM that takes.

    After a gap a tensor is paged in where `pages` says true, else recomputed: for that, inputs on
    storage are paged in and all others recomputed, as far back as needed.
    """
    return _GapExecution(problem, pages).run()


class _GapExecution(StagedExecution):
    def __init__(self, problem: Problem, pages: Mapping[Gap, bool]) -> None:
        super().__init__(problem.graph)
        self.out_after = {(gap.tensor, gap.before): page for gap, page in pages.items()}
        self.last_use = list(problem.graph.node_of)
        """The last node that has used each tensor in its own stage."""
        self.stored = {gap.tensor for gap, page in pages.items() if page}
        self.stored |= StorageSpace(problem).stored

    def pages_in(self, i: int) -> bool:
        return self.out_after.get((i, self.last_use[i]), i in self.stored)

    def retains(self, i: int) -> bool:
        return self.is_awaited(i) and (i, self.last_use[i]) not in self.out_after

    def compute(self, k: int) -> None:
        super().compute(k)
        if k == self.stage:
            for i in self.graph.inputs_of[k]:
                self.last_use[i] = k


def within_budget(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule, or raise `MethodNotApplicableError` unless it keeps the RAM budget."""
    usable = problem.usable_ram_bytes
    peak = simulate(problem.graph, problem.costs, schedule).peak
    if peak.ram_bytes > usable:
        raise MethodNotApplicableError(
            f"its schedule needs {format_bytes(peak.ram_bytes)} at "
            f"{problem.graph.nodes[peak.node].name!r}, and tensors may use {format_bytes(usable)}"
        )
    return schedule


# -- Capuchin --------------------------------------------------------------------------------------


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
