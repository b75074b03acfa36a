"""Methods that solve a mixed-integer program: each returns the problem that is solved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.problem import DeadlineCounts, Quantity

if TYPE_CHECKING:
    from poetmodel.problem import Problem


def optimal(problem: Problem) -> Problem:
    """Recompute and page with the least energy (POET, ICML 2022, section 5)."""
    return problem


def paging_only(problem: Problem) -> Problem:
    """Leave recomputation out (POET, ICML 2022, section 6.2)."""
    fits = problem.usable_ram_bytes >= checkpoint_all_peak_bytes(problem.graph)
    if not problem.can_page and not fits:
        raise MethodNotApplicableError("there is no storage to page to")
    return replace(problem, recompute=False)


def recompute_only(problem: Problem) -> Problem:
    """Leave paging out (POET, ICML 2022, section 6.2)."""
    return replace(problem, paging=False)


def resident(problem: Problem) -> Problem:
    """Keep all state in RAM, and schedule the rest with the least energy.

    On a graph without state the program is that of `optimal`.
    """
    state = problem.graph.state_tensors
    if not state:
        return problem

    def all_of_it(v: Any) -> Any:
        return sum(v.resident[i] for i in state) >= len(state)

    return problem.subject_to(**{"all state in RAM": all_of_it})


def checkmate(problem: Problem) -> Problem:
    """Recompute with the least compute time (Jain et al., MLSys 2020, section 4).

    Nothing is paged, and time is that of the core; the verifier alone sees deadline and energy
    budget, as Checkmate knows neither.

    Checkmate's stages are those of this package. Its memory is counted by the rules of execution
    here: workspaces count, and tensors are freed after their last use in a stage.
    """
    return replace(
        problem,
        paging=False,
        minimize=Quantity.TIME,
        deadline_counts=DeadlineCounts.COMPUTE,
        deadline=None,
        energy_budget=None,
    )
