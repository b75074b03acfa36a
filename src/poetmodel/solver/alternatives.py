"""What other decisions would have cost: solved again with one of them forbidden, or bounded.

A tensor's recomputation is forbidden by a graph whose node must not be computed again, which is
exact. Its paging is forbidden by a price: a transfer of it then costs more than the whole step. A
schedule without such a transfer costs what it did, so what is proved of the priced problem holds
for all schedules that do not page the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from poetmodel.problem import Quantity
from poetmodel.result import Status
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.schedule.relations import storage_entries
from poetmodel.solver.decisions import Fate, find_lives
from poetmodel.solver.facade import solve
from poetmodel.solver.outcome import verify_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.problem import Problem

MORE_RAM: Final = (0.01, 0.05)
"""How much more RAM its value is asked for, as parts of the budget."""
LEAST_S: Final = 0.1
"""Least time for one question [s]."""


class Forbidden(StrEnum):
    """What an alternative does without."""

    PAGING = "paging"
    """The tensor is not paged."""
    RECOMPUTATION = "recomputation"
    """The node is not computed again."""
    BOTH = "paging and recomputation"
    """Neither: the tensor is kept from its first computation to its last use."""
    KEEPING = "keeping"
    """The tensor leaves RAM between two uses."""


class How(StrEnum):
    """How the cost of an alternative was found."""

    SOLVED = "solved"
    """By solving again with the decision forbidden."""
    BOUNDED = "bounded"
    """Only limits on it are known."""
    IMPOSSIBLE = "impossible"
    """Proved: no schedule does without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What doing without a decision costs, beside the schedule that was explained."""

    tensor: int
    """The tensor."""
    forbidden: Forbidden
    """What is done without."""
    how: How
    """How it was found."""
    becomes: Fate | None = None
    """What becomes of the tensor then, in the schedule that was found."""
    energy_j: float | None = None
    """Energy of the schedule that was found, beyond the explained one's [J]; may be negative."""
    time_s: float | None = None
    """Its time beyond the explained one's, as the deadline counts it [s]."""
    least_j: float | None = None
    """Proved: no schedule without the decision costs less than this beyond the explained one [J].
    """

    @property
    def exact(self) -> bool:
        """Whether it is proved that nothing cheaper does without the decision."""
        if self.how == How.IMPOSSIBLE:
            return True
        return None not in (self.energy_j, self.least_j) and self.least_j == self.energy_j

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
    """What a larger RAM budget is worth."""

    more_bytes: int
    """How much larger [B]."""
    saved_j: float | None
    """Energy less than that of the explained schedule, with a schedule that was found [J]."""
    most_j: float | None
    """Proved: no schedule in that much RAM saves more than this [J]."""

    @property
    def saved_j_per_kb(self) -> float | None:
        """What 1000 bytes are worth on average over that much more [J]."""
        return None if self.saved_j is None else self.saved_j / (self.more_bytes / 1000)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return {
            "more_bytes": self.more_bytes,
            "saved_j": self.saved_j,
            "most_j": self.most_j,
            "saved_j_per_kb": self.saved_j_per_kb,
        }


def find_alternatives(
    problem: Problem, schedule: Schedule, i: int, *, time_limit: float = 10.0, threads: int = 1
) -> tuple[Alternative, ...]:
    """Find what the other decisions on a tensor would have cost.

    Parameters
    ----------
    problem : Problem
        What the schedule is for; its energy is compared, whatever it minimizes.
    schedule : Schedule
        Valid for the problem.
    i : int
        The tensor.
    time_limit : float
        Wall time for all of them [s].
    threads : int
        As for `solve`.

    Returns
    -------
    tuple of Alternative
        For a tensor that is paged or recomputed: without that, and without both. For one that is
        kept: paged, or recomputed, in the longest of its gaps between two uses, which is an upper
        bound. Energies and times are the simulator's.
    """
    fate = find_lives(problem, schedule)[i].fate
    if fate == Fate.UNUSED:
        return ()
    if fate == Fate.KEPT:
        return tuple(_let_go(problem, schedule, i))
    ways = {
        Fate.PAGED: (Forbidden.PAGING, Forbidden.BOTH),
        Fate.RECOMPUTED: (Forbidden.RECOMPUTATION, Forbidden.BOTH),
        Fate.BOTH: tuple(Forbidden)[:3],
    }[fate]
    if not (problem.can_page and problem.may_recompute(problem.graph.node_of[i])):
        ways = (Forbidden.BOTH,)  # only one of them is possible at all
    part_s = max(LEAST_S, time_limit / len(ways))
    found = [
        _solve_without(problem, schedule, i, way, time_limit=part_s, threads=threads)
        for way in ways
    ]
    return tuple(_with_tighter(other, found[-1]) for other in found)


def value_of_ram(
    problem: Problem, schedule: Schedule, *, time_limit: float = 10.0, threads: int = 1
) -> tuple[MoreRam, ...]:
    """Find what a little more RAM would save, by solving again with it.

    Parameters
    ----------
    problem, schedule, time_limit, threads
        As for `find_alternatives`.

    Returns
    -------
    tuple of MoreRam
        For each of `MORE_RAM`.
    """
    energy_j = verify_schedule(problem, schedule).simulation.energy_j or 0.0
    found = []
    for part in MORE_RAM:
        more = max(1, math.ceil(part * problem.ram_budget_bytes))
        larger = replace(
            problem, ram=problem.ram_budget_bytes + more, minimize=str(Quantity.ENERGY)
        )
        result = solve(
            larger,
            time_limit=max(LEAST_S, time_limit / len(MORE_RAM)),
            start=schedule,
            threads=threads,
        )
        saved = None if result.energy_j is None else energy_j - result.energy_j
        bound = result.bound_j
        if bound is None:
            bound = problem.baseline_energy_j
        found.append(MoreRam(more_bytes=more, saved_j=saved, most_j=energy_j - bound))
    return tuple(found)


def _solve_without(
    problem: Problem,
    schedule: Schedule,
    i: int,
    way: Forbidden,
    *,
    time_limit: float,
    threads: int,
) -> Alternative:
    before = verify_schedule(problem, schedule).simulation
    asked = replace(problem, minimize=str(Quantity.ENERGY))
    if way in (Forbidden.PAGING, Forbidden.BOTH) and problem.can_page:
        asked = _priced(asked, i, 2 * max(before.energy_j or 0.0, problem.energy_budget_j or 0.0))
    if way in (Forbidden.RECOMPUTATION, Forbidden.BOTH):
        asked = _not_recomputable(asked, problem.graph.node_of[i])
    result = solve(asked, time_limit=time_limit, threads=threads)
    if result.status == Status.INFEASIBLE:
        return Alternative(tensor=i, forbidden=way, how=How.IMPOSSIBLE)
    energy_j = before.energy_j or 0.0
    bound = result.bound_j
    least_j = None if bound is None else bound - energy_j
    if result.schedule is None:
        return Alternative(tensor=i, forbidden=way, how=How.BOUNDED, least_j=least_j)
    other = replace(result.schedule, identity=GraphIdentity.of(problem.graph))
    candidate = verify_schedule(replace(problem, minimize=str(Quantity.ENERGY)), other)
    becomes = find_lives(problem, other)[i].fate
    paged = becomes in (Fate.PAGED, Fate.BOTH)
    if candidate.violations or (paged and way != Forbidden.RECOMPUTATION):
        return Alternative(tensor=i, forbidden=way, how=How.BOUNDED, least_j=least_j)
    after = candidate.simulation
    cost_j = (after.energy_j or 0.0) - energy_j
    if result.gap == 0.0:
        least_j = cost_j
    return Alternative(
        tensor=i,
        forbidden=way,
        how=How.SOLVED if result.status == Status.OPTIMAL else How.BOUNDED,
        becomes=becomes,
        energy_j=cost_j,
        time_s=(after.time_s or 0.0) - (before.time_s or 0.0),
        least_j=least_j,
    )


def _with_tighter(other: Alternative, tighter: Alternative) -> Alternative:
    """Return an alternative that is no dearer than one that does without more."""
    known_j = math.inf if other.energy_j is None else other.energy_j
    if tighter.energy_j is None or known_j <= tighter.energy_j:
        return other
    return replace(other, becomes=tighter.becomes, energy_j=tighter.energy_j, time_s=tighter.time_s)


def _priced(problem: Problem, i: int, price_j: float) -> Problem:
    """Return the problem with a price on every page-in of a tensor."""
    costs, name = problem.costs, problem.graph.tensors[i].name
    if costs.pages is None:
        return problem
    page = costs.pages[name]
    dear = replace(page, page_in=replace(page.page_in, energy_j=page.page_in.energy_j + price_j))
    return replace(problem, costs=replace(costs, pages={**costs.pages, name: dear}))


def _not_recomputable(problem: Problem, k: int) -> Problem:
    """Return the problem with a graph whose node `k` is computed once only."""
    nodes = list(problem.graph.nodes)
    nodes[k] = replace(nodes[k], recomputable=False)
    return replace(problem, graph=replace(problem.graph, nodes=tuple(nodes)))


def _let_go(problem: Problem, schedule: Schedule, i: int) -> Iterator[Alternative]:
    """Yield what it costs at most to let a kept tensor go in the longest gap between two uses."""
    graph, k = problem.graph, problem.graph.node_of[i]
    before = verify_schedule(problem, schedule).simulation
    stages = sorted({t for t, j in schedule.R if j in graph.users_of[i]} | {k})
    gaps = [(after - first, first, after) for first, after in pairwise(stages)]
    if not gaps:
        return
    _, first, after = max(gaps)
    kept = [(t, j) for t, j in schedule.S_RAM if j != i or not first < t <= after]
    changes: dict[Fate, dict[str, Any]] = {}
    if problem.can_page:
        came = (*schedule.M_in, (after, i))
        changes[Fate.PAGED] = {
            "S_RAM": kept,
            "M_in": came,
            "M_out": (*schedule.M_out, (k, i)),
            "S_AUX": (*schedule.S_AUX, *(storage_entries(graph, [(after, i)]))),
        }
    if problem.may_recompute(k):
        changes[Fate.RECOMPUTED] = {"S_RAM": kept, "R": (*schedule.R, (after, k))}
    for fate, change in changes.items():
        candidate = verify_schedule(problem, replace(schedule, **change))
        figures = candidate.simulation
        possible = not candidate.violations
        yield Alternative(
            tensor=i,
            forbidden=Forbidden.KEEPING,
            how=How.BOUNDED,
            becomes=fate,
            energy_j=(figures.energy_j or 0.0) - (before.energy_j or 0.0) if possible else None,
            time_s=(figures.time_s or 0.0) - (before.time_s or 0.0) if possible else None,
        )
