"""Which limits bind: proved by solving again without each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.solver import solve
from poetmodel.solver.binding import Binding, binding_limits

if TYPE_CHECKING:
    import pytest


def skip_problem(**limits: Any) -> Problem:
    """Return a chain with a skip: a (4 B) is read by b and d; keeping it takes 12 B at c.

    Below that it is computed anew for 1 s and 3 J, or paged for 4 s and 1 J. A pass: 4 s and 6 J.
    """
    graph = Graph(
        name="skip",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=4, inputs=("a",)),
            operation("c", output_bytes=4, inputs=("b",)),
            operation("d", output_bytes=1, inputs=("c", "a")),
        ),
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1, 1, 1, 1],
        compute_energy_j=[3, 1, 1, 1],
        page_in=[(2, 0.5)] * 4,
        page_out=[(2, 0.5)] * 4,
    )
    return Problem(graph, costs, **{"deadline_counts": "serial", **limits})


def answers(**limits: Any) -> dict[str, str]:
    """Return for each limit stated whether it binds."""
    result = solve(skip_problem(**limits))
    return {str(found.limit): str(found.binding) for found in binding_limits(result)}


def test_ram_alone_binds_where_not_everything_fits() -> None:
    """With 10 B something must go; with 12 B nothing, and nothing is gained by more."""
    assert answers(ram=10) == {"ram": "binds"}
    assert answers(ram=12) == {"ram": "slack"}


def test_deadline_binds_where_it_rules_the_cheaper_way_out() -> None:
    """8 s are enough for paging, so more is no gain; 7 s force the recomputation."""
    assert answers(ram=10, deadline=8) == {"ram": "binds", "time": "slack"}
    assert answers(ram=10, deadline=7) == {"ram": "binds", "time": "binds"}


def test_energy_budget_binds_where_time_is_minimized() -> None:
    """The quicker way needs 9 J."""
    fast = {"ram": 10, "minimize": "time"}
    assert answers(**fast, energy_budget=9) == {"ram": "binds", "energy": "slack"}
    assert answers(**fast, energy_budget=8) == {"ram": "binds", "energy": "binds"}


def test_of_limits_that_exclude_each_other_all_are_in_the_way() -> None:
    """With 7 s and 8 J neither way is left; each limit gone, there is one."""
    assert answers(ram=10, deadline=7, energy_budget=8) == {
        "ram": "binds",
        "time": "binds",
        "energy": "binds",
    }


def test_limits_that_nothing_can_keep_are_told_apart() -> None:
    """Deadline and energy are each too little for one pass; the RAM is not the obstacle."""
    assert answers(ram=12, deadline=3, energy_budget=5) == {
        "ram": "slack",
        "time": "impossible",
        "energy": "impossible",
    }


def test_figures_are_used_and_allowed() -> None:
    """In bytes, seconds and joules, and what is minimized without the limit; d takes 9 B."""
    result = solve(skip_problem(ram=10, deadline=7))
    ram, time = binding_limits(result)
    assert (ram.used, ram.allowed, ram.without) == (9, 10, 6.0)
    assert (time.used, time.allowed, time.without) == (5.0, 7.0, 7.0)


def test_without_a_proof_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solve without the limit proves nothing, the answer is open."""
    result = solve(skip_problem(ram=10, deadline=7))

    def unproved(problem: Problem, **options: Any) -> Any:
        found = solve(problem, **options)
        return replace(
            found, status=Status.UNKNOWN, schedule=None, simulation=None, objective_bound=None
        )

    monkeypatch.setattr("poetmodel.solver.binding.solve", unproved)
    assert {found.binding for found in binding_limits(result)} == {Binding.OPEN}
