"""Schedules without a solver: greedy eviction to storage or to recomputation.

They start the search, and are what is returned when time runs out before a better one is found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.graph import checkpoint_all_peak_bytes, working_set_bytes
from poetmodel.model.events import storage_is_limiting
from poetmodel.problem import Quantity
from poetmodel.result import measured
from poetmodel.schedule import (
    GraphIdentity,
    Schedule,
    checkpoint_all,
    simulate,
    storage_entries,
    verify,
)
from poetmodel.solve.trimming import trim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from poetmodel.problem import Problem
    from poetmodel.schedule import MemoryPoint

_REPAIRS: Final = 12
"""How often a plan whose transients do not fit is repaired."""
_REFRESH: Final = 32
"""After how many evictions cost estimates are made anew."""
_DEPTH: Final = 6
"""Longest chain of recomputations that the cost estimate follows."""
_DEPTH_WITHOUT_PAGES: Final = 300
"""The same where nothing can be paged, so that a chain may reach back to its beginning."""


def construct(problem: Problem, *, most_s: float = float("inf")) -> Schedule | None:
    """Return a valid schedule made greedily, the cheapest of a few, or None if none was found.

    Parameters
    ----------
    problem : Problem
        What to schedule.
    most_s : float
        Time after which it chooses less carefully and returns what it has [s].

    Notes
    -----
    Where tensors may be paged, storage is not limiting and there is no deadline, one is found
    whenever the budget is at least the floor: every tensor can go out and come back at each use.
    """
    best: tuple[float, Schedule] | None = None
    until_s = time.monotonic() + most_s
    for charge in _charges(problem):
        for pages, recomputes in ((True, True), (True, False)):
            if recomputes is False and not problem.can_page:
                continue
            if best is not None and time.monotonic() > until_s:
                return best[1]
            greedy = _Greedy(problem, charge, pages=pages, recomputes=recomputes, until_s=until_s)
            schedule = greedy.run()
            if schedule is None:
                continue
            verdict = verify(problem, schedule)
            if verdict.violations:
                continue
            value = measured(problem, verdict.simulation)
            if best is None or value < best[0]:
                best = (value, schedule)
    return None if best is None else best[1]


def offload_all(problem: Problem) -> Schedule | None:
    """Return the schedule that pages everything out at once and in at each use, if that is allowed.

    Every stage then holds its own working set only: valid at the floor, found in no time.
    """
    if not problem.can_page:
        return None
    charge = _Charge(lambda _: 0.0, lambda _: 0.0, lambda _: 0.0)
    return _Greedy(problem, charge, pages=True, recomputes=False).page_everything()


@dataclass(frozen=True, slots=True)
class _Charge:
    """What evictions cost: in energy, or in a quantity whose limit is tight."""

    compute: Callable[[int], float]
    page_in: Callable[[int], float]
    page_out: Callable[[int], float]


def _charges(problem: Problem) -> Iterator[_Charge]:
    """Yield what to be greedy about: the objective first, then each limit that could be missed."""
    table, sizes = problem.table, problem.graph.tensor_bytes
    energy = _Charge(problem.compute_charge_j, problem.page_in_charge_j, problem.page_out_charge_j)
    counts = 0.0 if problem.deadline_counts == "compute" else 1.0
    time = _Charge(
        lambda k: table.compute_time_s[k],
        lambda i: counts * table.page_in_time_s[i],
        lambda i: counts * table.page_out_time_s[i],
    )
    writes = _Charge(lambda _: 0.0, lambda _: 0.0, lambda i: sizes[i])
    if problem.minimize in (Quantity.ENERGY, Quantity.RAM):
        yield energy
    if problem.minimize == Quantity.TIME or problem.deadline_s is not None:
        yield time
    if problem.minimize == Quantity.WRITES or storage_is_limiting(problem):
        yield writes
    if problem.minimize in (Quantity.TIME, Quantity.WRITES) and problem.energy_budget_j is not None:
        yield energy


@dataclass(slots=True)
class _Segment:
    """A tensor between two uses of the plain execution."""

    tensor: int
    first: int
    """First stage that it crosses without being used."""
    last: int
    """Last such stage; the next use is one later."""
    chosen: bool = False
    """Whether it is out of RAM there."""


@dataclass(slots=True)
class _Greedy:
    problem: Problem
    charge: _Charge
    pages: bool
    recomputes: bool
    segments: list[_Segment] = field(default_factory=list)
    of: list[list[_Segment]] = field(default_factory=list)
    """For each tensor its segments."""
    estimates: dict[tuple[int, int], float | None] = field(default_factory=dict)
    """What `_estimate` found since it was last cleared."""
    until_s: float = float("inf")
    """When to stop choosing carefully, on the monotonic clock [s]."""
    spans: NDArray[np.int64] = field(init=False)
    """First and last stage of each segment, shape (segments, 2)."""
    sizes: NDArray[np.int64] = field(init=False)
    """Bytes of each segment's tensor, shape (segments,)."""
    load: NDArray[np.int64] = field(init=False)
    """Bytes of every stage row in the plan so far, shape (stages,)."""
    margin: NDArray[np.int64] = field(init=False)
    """For each stage, RAM set aside for transients of its recomputations [B]."""
    page_only: set[tuple[int, int]] = field(default_factory=set)
    """(stage, tensor) whose recomputation did not fit."""

    def run(self) -> Schedule | None:
        problem = self.problem
        graph = problem.graph
        self.pages = self.pages and problem.can_page
        self.margin = np.zeros(len(graph.nodes), dtype=np.int64)
        self._prepare()
        for _ in range(_REPAIRS):
            self.estimates.clear()
            if not self._evict():
                return None
            schedule = self._materialize()
            if schedule is None:
                return None
            simulation = simulate(graph, problem.costs, schedule)
            over = [p for p in simulation.curve if p.ram_bytes > problem.usable_ram_bytes]
            if not over:
                return trim(graph, schedule)
            self._repair(schedule, over)
        return None

    def page_everything(self) -> Schedule | None:
        self._prepare()
        for segment in self.segments:
            segment.chosen = True
        schedule = self._materialize()
        return None if schedule is None else trim(self.problem.graph, schedule)

    def _prepare(self) -> None:
        graph = self.problem.graph
        sizes = graph.tensor_bytes
        self.load = np.array(
            [working_set_bytes(graph, k) for k in range(len(graph.nodes))], dtype=np.int64
        )
        self.of = [[] for _ in graph.tensors]
        for i, users in enumerate(graph.users_of):
            previous = graph.node_of[i]
            for use in users:
                if use > previous + 1:
                    self.of[i].append(_Segment(i, previous + 1, use - 1))
                    self.load[previous + 1 : use] += sizes[i]
                previous = use
        self.segments = [segment for segments in self.of for segment in segments]
        self.spans = np.array([(s.first, s.last) for s in self.segments], dtype=np.int64)
        self.spans = self.spans.reshape(-1, 2)
        self.sizes = np.array([sizes[s.tensor] for s in self.segments], dtype=np.int64)

    # -- choosing what leaves RAM ------------------------------------------------------------

    def _evict(self) -> bool:
        """Choose segments until every stage fits; return whether that was possible."""
        for pick in count():
            if pick % _REFRESH == 0:
                self.estimates.clear()
            excess = self._excess()
            worst = int(excess.argmax())
            if excess[worst] <= 0:
                self._restore()
                return True
            crowded = np.concatenate(([0], np.cumsum(excess > 0)))
            if time.monotonic() > self.until_s and self.pages:
                self._page_all(crowded)
                continue
            best = self._most_relief(worst, int(excess[worst]), crowded)
            if best is None:
                return False
            self._switch(best, chosen=True)
        return False

    def _most_relief(self, worst: int, excess: int, crowded: NDArray[np.int64]) -> int | None:
        """Return the segment across the fullest stage that relieves crowded stages most cheaply."""
        first, last = self.spans[:, 0], self.spans[:, 1]
        chosen = np.array([segment.chosen for segment in self.segments], dtype=bool)
        crossing = np.flatnonzero((first <= worst) & (worst <= last) & ~chosen & (self.sizes > 0))
        best: tuple[float, int] | None = None
        for place in crossing.tolist():
            segment = self.segments[place]
            cost = self._estimate(segment.tensor, segment.last + 1, _DEPTH)
            if cost is None:
                continue
            size = int(self.sizes[place])
            stages = int(crowded[segment.last + 1] - crowded[segment.first])
            relief = min(size, excess) + size * (stages - 1)
            score = relief / cost if cost > 0 else float("inf")
            if best is None or score > best[0]:
                best = (score, place)
        return None if best is None else best[1]

    def _page_all(self, crowded: NDArray[np.int64]) -> None:
        """Choose everything that crosses a crowded stage: quick, where time is short."""
        for place, segment in enumerate(self.segments):
            if not segment.chosen and crowded[segment.last + 1] > crowded[segment.first]:
                self._switch(place, chosen=True)

    def _restore(self) -> None:
        """Keep again what need not have left, the dearest first."""
        costs = {
            place: self._estimate(segment.tensor, segment.last + 1, _DEPTH) or 0.0
            for place, segment in enumerate(self.segments)
            if segment.chosen
        }
        excess = self._excess()
        for place in sorted(costs, key=lambda place: -costs[place]):
            span = slice(self.spans[place, 0], self.spans[place, 1] + 1)
            if (excess[span] + self.sizes[place] <= 0).all():
                self._switch(place, chosen=False)
                excess[span] += self.sizes[place]

    def _excess(self) -> NDArray[np.int64]:
        return self.load + self.margin - self.problem.usable_ram_bytes

    def _switch(self, place: int, *, chosen: bool) -> None:
        self.segments[place].chosen = chosen
        span = slice(self.spans[place, 0], self.spans[place, 1] + 1)
        self.load[span] -= self.sizes[place] if chosen else -self.sizes[place]

    def _estimate(self, i: int, t: int, depth: int) -> float | None:
        """Return about what having tensor `i` in RAM again in stage `t` costs, None if it can't."""
        if (t, i) not in self.estimates:
            self.estimates[t, i] = self._estimate_anew(i, t, depth)
        return self.estimates[t, i]

    def _estimate_anew(self, i: int, t: int, depth: int) -> float | None:
        graph = self.problem.graph
        k = graph.node_of[i]
        options = []
        if self.pages:
            out = 0.0 if graph.nodes[k].on_aux else self.charge.page_out(i)
            options.append(self.charge.page_in(i) + out)
        can = self.recomputes and self.problem.may_recompute(k) and (t, i) not in self.page_only
        if can and depth:
            total = self.charge.compute(k)
            for p in graph.inputs_of[k]:
                if p in graph.inputs_of[t] or self._stays(p, t):
                    continue
                cost = self._estimate(p, t, depth - 1)
                if cost is None:
                    break
                total += cost
            else:
                options.append(total)
        return min(options, default=None)

    def _stays(self, p: int, t: int) -> bool:
        """Return whether tensor `p` crosses stage `t` in RAM in the plan so far."""
        users = self.problem.graph.users_of[p]
        if not users or users[-1] <= t:
            return False
        return not any(s.chosen and s.tensor == p and s.first <= t <= s.last for s in self.of[p])

    # -- carrying the plan out -----------------------------------------------------------------

    def _materialize(self) -> Schedule | None:
        graph = self.problem.graph
        absent = {
            (t, s.tensor) for s in self.segments if s.chosen for t in range(s.first, s.last + 2)
        }
        in_ram: set[int] = set()
        computed, kept, page_in = [], [], []
        for t in range(len(graph.nodes)):
            kept += [(t, i) for i in in_ram]
            stage = _Stage(self, t, in_ram)
            if not all(stage.supply(i) for i in graph.inputs_of[t]):
                return None
            computed += [(t, k) for k in (*stage.computed, t)]
            page_in += [(t, i) for i in stage.paged]
            present = in_ram | stage.present | set(graph.outputs_of[t])
            in_ram = {
                i
                for i in present
                if graph.users_of[i] and graph.users_of[i][-1] > t and (t + 1, i) not in absent
            }
        out = {i for _, i in page_in if not graph.nodes[graph.node_of[i]].on_aux}
        return Schedule(
            R=tuple(computed),
            S_RAM=tuple(kept),
            S_AUX=storage_entries(graph, page_in),
            M_in=tuple(page_in),
            M_out=tuple((graph.node_of[i], i) for i in out),
            identity=GraphIdentity.of(graph),
        )

    def _repair(self, schedule: Schedule, over: list[MemoryPoint]) -> None:
        """Page instead of recompute where transients did not fit, or set RAM aside for them."""
        usable = self.problem.usable_ram_bytes
        graph = self.problem.graph
        for point in over:
            t = point.stage
            again = {k for stage, k in schedule.R if stage == t and k < t}
            made = {(t, i) for k in again for i in graph.outputs_of[k]}
            if self.pages and made - self.page_only:
                self.page_only |= made
            else:
                self.margin[t] += point.ram_bytes - usable


class _Stage:
    """Supplies the inputs of one stage, by page-in or recomputation, whichever is cheaper."""

    def __init__(self, greedy: _Greedy, t: int, in_ram: set[int]) -> None:
        self.greedy = greedy
        self.t = t
        self.in_ram = in_ram
        self.present: set[int] = set()
        self.computed: set[int] = set()
        self.paged: set[int] = set()
        self.costs: dict[int, float | None] = {}

    def supply(self, i: int, depth: int = 200) -> bool:
        if i in self.in_ram or i in self.present:
            return True
        choice = self._cheaper(i)
        if choice is None or depth == 0:
            return False
        if choice == "page":
            self.paged.add(i)
            self.present.add(i)
            return True
        graph = self.greedy.problem.graph
        k = graph.node_of[i]
        if not all(self.supply(p, depth - 1) for p in graph.inputs_of[k]):
            return False
        self.computed.add(k)
        self.present.update(graph.outputs_of[k])
        # What was paged in for this stage and is now made again need not come from storage.
        self.paged.difference_update(graph.outputs_of[k])
        return True

    def _cheaper(self, i: int) -> str | None:
        greedy = self.greedy
        graph = greedy.problem.graph
        k = graph.node_of[i]
        page = None
        if greedy.pages:
            out = 0.0 if graph.nodes[k].on_aux else greedy.charge.page_out(i)
            page = greedy.charge.page_in(i) + out
        self.costs.clear()
        again = self._recompute_cost(i, _DEPTH if greedy.pages else _DEPTH_WITHOUT_PAGES)
        if again is not None and (page is None or again < page):
            return "compute"
        return None if page is None else "page"

    def _recompute_cost(self, i: int, depth: int) -> float | None:
        if i not in self.costs:
            self.costs[i] = self._recompute_cost_anew(i, depth)
        return self.costs[i]

    def _recompute_cost_anew(self, i: int, depth: int) -> float | None:
        greedy = self.greedy
        graph = greedy.problem.graph
        k = graph.node_of[i]
        allowed = greedy.recomputes and greedy.problem.may_recompute(k)
        if not allowed or (self.t, i) in greedy.page_only or depth == 0:
            return None
        total = greedy.charge.compute(k)
        for p in graph.inputs_of[k]:
            if p in self.in_ram or p in self.present:
                continue
            costs = [self._recompute_cost(p, depth - 1)]
            if greedy.pages:
                costs.append(greedy.charge.page_in(p) + greedy.charge.page_out(p))
            known = [cost for cost in costs if cost is not None]
            if not known:
                return None
            total += min(known)
        return total


def trivial(problem: Problem) -> Schedule | None:
    """Return checkpoint-all where it keeps every limit: nothing can cost less than it."""
    if checkpoint_all_peak_bytes(problem.graph) > problem.usable_ram_bytes:
        return None
    schedule = checkpoint_all(problem.graph)
    return None if verify(problem, schedule).violations else schedule
