"""The cost of alternatives: a problem solved again with one decision forbidden, or with more RAM.

Recomputation of a node is forbidden by the graph, which is exact, and a home of state by an own
constraint. Paging of a tensor is forbidden
by a price: each page-in of it costs more than the whole schedule. A schedule without these page-ins
costs what it did, so that a bound of the priced problem holds for all schedules that do not page
the tensor.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Final

from poetmodel.planner import verify
from poetmodel.problem import Constraint, Problem, Quantity
from poetmodel.problem.totals import Count
from poetmodel.result import SolveResult, Status
from poetmodel.schedule import Schedule, Simulation, storage_entries
from poetmodel.schedule.decisions import Treatment, find_decisions
from poetmodel.solver.sensitivity.variants import ChangedProblem, of_graph, solve_variants
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MORE_RAM: Final = (0.01, 0.05)
"""How much more RAM its value is for, as parts of the budget."""


class Forbidden(StrEnum):
    """Forbidden decisions of an alternative."""

    PAGING = "paging"
    """The tensor is not paged."""
    RECOMPUTATION = "recomputation"
    """Its node is not computed again."""
    BOTH = "paging and recomputation"
    """The tensor is kept from its first computation to its last use."""
    KEEPING = "keeping"
    """The tensor leaves RAM between two uses."""
    STORAGE = "a home on storage"
    """The state tensor is resident."""
    RESIDENCE = "a home in RAM"
    """The state tensor lies on storage."""


class How(StrEnum):
    """How the cost of an alternative was found."""

    SOLVED = "solved"
    """Solved again, with the decision forbidden."""
    BOUNDED = "bounded"
    """Only limits on it are known."""
    IMPOSSIBLE = "impossible"
    """Proven: no schedule does without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A schedule without some decision; costs are beyond those of the explained schedule."""

    tensor: int
    forbidden: Forbidden
    how: How
    becomes: Treatment | None = None
    """The decision on the tensor in the schedule that was found; None where twins differ."""
    energy_j: float | None = None
    """Energy of that schedule [J]; may be negative."""
    time_s: float | None = None
    """Its time, as the deadline counts it [s]."""
    least_j: float | None = None
    """Proven: no schedule without the decision costs less than this [J]."""

    @property
    def exact(self) -> bool:
        """Whether it is proven that nothing cheaper does without the decision."""
        if self.how == How.IMPOSSIBLE:
            return True
        return self.energy_j is not None and self.least_j == self.energy_j

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return {
            "without": str(self.forbidden),
            "how": str(self.how),
            "becomes": None if self.becomes is None else str(self.becomes),
            "energy_j": self.energy_j,
            "least_j": self.least_j,
            "time_s": self.time_s,
            "exact": self.exact,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRam:
    """The value of a larger RAM budget."""

    more_bytes: int
    """How much larger [B]."""
    saved_j: float | None
    """Energy that a schedule found with it saves [J]."""
    most_j: float | None
    """Proven: no schedule in that much RAM saves more than this [J]."""

    @property
    def saved_j_per_kb(self) -> float | None:
        """Savings of 1000 more bytes on average [J]."""
        return None if self.saved_j is None else self.saved_j / (self.more_bytes / 1000)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return asdict(self) | {"saved_j_per_kb": self.saved_j_per_kb}


_HOMES: Final = {Treatment.ON_STORAGE: Forbidden.STORAGE, Treatment.RESIDENT: Forbidden.RESIDENCE}
"""Forbidden decisions on state, by its home."""


def find_alternatives(
    problem: Problem,
    schedule: Schedule,
    i: int,
    *,
    twins: Sequence[int] = (),
    time_limit: float = 10.0,
    threads: int = 1,
) -> tuple[Alternative, ...]:
    """Find the cost of the alternatives for tensor `i` of a valid schedule, in `time_limit` [s].

    What is forbidden of it, is forbidden of its `twins` too: other tensors of which the schedule
    decides the same, and which could take over.

    For a tensor that is paged or recomputed: without that, and without both. For one that is kept:
    paged, or recomputed, in the longest gap between two uses, which is an upper bound. For state:
    its other home. Energies are compared, whatever the problem minimizes; they and times are the
    simulator's.
    """
    choice = find_decisions(problem, schedule)[i].choice
    if choice in (Treatment.UNUSED, Treatment.REPLACEMENT):
        return ()
    before = verify(problem, schedule).simulation
    if choice == Treatment.KEPT:
        return tuple(_without_keeping(problem, schedule, i, before))
    home = _HOMES.get(choice)
    if home == Forbidden.RESIDENCE and not problem.can_page:
        return ()
    ways = [home or Forbidden.BOTH]
    if home is None and problem.can_page and problem.may_recompute(problem.graph.node_of[i]):
        if choice != Treatment.PAGED:
            ways.append(Forbidden.RECOMPUTATION)
        if choice != Treatment.RECOMPUTED:
            ways.append(Forbidden.PAGING)
    tensors = (i, *twins)
    changed = [ChangedProblem(problem=_forbidding(problem, tensors, way, before)) for way in ways]
    results = solve_variants(changed, time_limit=time_limit, threads=threads)
    alternatives = [
        _alternative(problem, tensors, way, before, result)
        for way, result in zip_longest(ways, results)
    ]
    return tuple(reversed(alternatives))


def value_of_ram(
    problem: Problem, schedule: Schedule, *, time_limit: float = 10.0, threads: int = 1
) -> tuple[MoreRam, ...]:
    """Find what a little more RAM saves: one answer for each of `MORE_RAM`, where there is more."""
    energy_j = verify(problem, schedule).simulation.energy_j or 0.0
    ram = problem.ram_budget_bytes
    more = [max(1, math.ceil(part * ram)) for part in MORE_RAM]
    more = [size for size in more if ram + size <= MAX_BYTES]
    variants = [
        ChangedProblem(problem=replace(problem, ram=ram + size, minimize=Quantity.ENERGY))
        for size in more
    ]
    results = solve_variants(variants, time_limit=time_limit, threads=threads, start=schedule)
    answers = []
    for size, result in zip_longest(more, results):
        after_j = None if result is None else result.energy_j
        bound_j = None if result is None else result.objective_bound
        answers.append(
            MoreRam(
                more_bytes=size,
                saved_j=None if after_j is None else energy_j - after_j,
                most_j=energy_j - (problem.baseline_energy_j if bound_j is None else bound_j),
            )
        )
    return tuple(answers)


def _forbidding(
    problem: Problem, tensors: Sequence[int], way: Forbidden, before: Simulation
) -> Problem:
    graph, costs = problem.graph, problem.costs
    if way in _HOMES.values():
        for i in tensors:
            row = _at_home(problem, i, resident=way == Forbidden.STORAGE)
            problem = replace(problem, constraints=(*problem.constraints, row))
        return replace(problem, minimize=Quantity.ENERGY)
    if way != Forbidden.PAGING:
        once = {graph.node_of[i] for i in tensors}
        nodes = (
            replace(node, recomputable=False) if k in once else node
            for k, node in enumerate(graph.nodes)
        )
        graph = replace(graph, nodes=tuple(nodes))
    if way != Forbidden.RECOMPUTATION and problem.can_page and costs.pages is not None:
        pages = dict(costs.pages)
        price_j = 2 * max(before.energy_j or 0.0, problem.energy_budget_j or 0.0)
        for name in (graph.tensors[i].name for i in tensors):
            page_in = pages[name].page_in
            dear = replace(page_in, energy_j=page_in.energy_j + price_j)
            pages[name] = replace(pages[name], page_in=dear)
        costs = replace(costs, pages=pages)
    return replace(problem, graph=graph, costs=costs, minimize=Quantity.ENERGY)


def _at_home(problem: Problem, i: int, *, resident: bool) -> Constraint:
    """Return the constraint that a state tensor is resident, or that it is not."""
    tensor, taken = problem.graph.tensors[i].name, {row.name for row in problem.constraints}
    name = f"home of {tensor}"
    while name in taken:
        name += "'"
    terms: dict[str, float] = {f"{Count.RESIDENT}:{tensor}": 1}
    return Constraint(name=name, terms=terms, lower=+resident, upper=+resident)


def _alternative(
    problem: Problem,
    tensors: Sequence[int],
    way: Forbidden,
    before: Simulation,
    result: SolveResult | None,
) -> Alternative:
    """Return the result with something forbidden; no result if it was not asked."""
    blank = Alternative(tensor=tensors[0], forbidden=way, how=How.BOUNDED)
    if result is None:
        return blank
    if result.status == Status.INFEASIBLE:
        return replace(blank, how=How.IMPOSSIBLE)
    energy_j, bound_j = before.energy_j or 0.0, result.objective_bound
    blank = replace(blank, least_j=None if bound_j is None else bound_j - energy_j)
    if result.schedule is None:
        return blank
    schedule = of_graph(result.schedule, problem.graph)
    verdict, decisions = verify(problem, schedule), find_decisions(problem, schedule)
    become = {decisions[i].choice for i in tensors}
    paged = any(choice.pages for choice in become)
    if verdict.violations or (paged and way in (Forbidden.PAGING, Forbidden.BOTH)):
        return blank
    after = verdict.simulation
    cost_j = (after.energy_j or 0.0) - energy_j
    return replace(
        blank,
        how=How.SOLVED if result.status == Status.OPTIMAL else How.BOUNDED,
        becomes=become.pop() if len(become) == 1 else None,
        energy_j=cost_j,
        time_s=(after.time_s or 0.0) - (before.time_s or 0.0),
        least_j=cost_j if result.gap == 0.0 else blank.least_j,
    )


def _without_keeping(
    problem: Problem, schedule: Schedule, i: int, before: Simulation
) -> Iterator[Alternative]:
    """Yield what it costs at most to drop a kept tensor in the longest gap between two uses."""
    graph, k = problem.graph, problem.graph.node_of[i]
    stages = sorted({t for t, j in schedule.R if j in graph.users_of[i]} | {k})
    gaps = [(after - first, first, after) for first, after in pairwise(stages)]
    if not gaps:
        return
    _, first, after = max(gaps)
    kept = tuple((t, j) for t, j in schedule.S_RAM if j != i or not first < t <= after)
    dropped = replace(schedule, S_RAM=kept)
    ways = {}
    if problem.can_page:
        ways[Treatment.PAGED] = replace(
            dropped,
            M_in=(*schedule.M_in, (after, i)),
            M_out=(*schedule.M_out, (k, i)),
            S_AUX=(*schedule.S_AUX, *storage_entries(graph, [(after, i)], schedule.resident)),
        )
    if problem.may_recompute(k) and after <= problem.graph.last_stages[k]:
        ways[Treatment.RECOMPUTED] = replace(dropped, R=(*schedule.R, (after, k)))
    for choice, changed in ways.items():
        verdict = verify(problem, changed)
        figures, valid = verdict.simulation, verdict.valid
        yield Alternative(
            tensor=i,
            forbidden=Forbidden.KEEPING,
            how=How.BOUNDED,
            becomes=choice,
            energy_j=(figures.energy_j or 0.0) - (before.energy_j or 0.0) if valid else None,
            time_s=(figures.time_s or 0.0) - (before.time_s or 0.0) if valid else None,
        )
