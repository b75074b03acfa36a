"""Which limits bind."""

from dataclasses import replace

import pytest

from kit.worked import skip_problem
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.solver.facade import execute
from poetmodel.solver.sensitivity import LimitState, find_used_limits, variants


def priced_problem(**limits):
    """Return a chain with a skip: a (4 B) is read by b and d; keeping it needs 12 B at c.

    Below that, it is recomputed for 1 s and 3 J, or paged for 4 s and 1 J. A pass: 4 s and 6 J.
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


@pytest.mark.parametrize(
    ("limits", "states"),
    [
        # With 10 B something must go; with 12 B nothing, and nothing is gained by more.
        ({"ram": 10}, "ram binds 1"),
        ({"ram": 12}, "ram slack 0"),
        # 8 s are enough for paging, so more is no gain; 7 s force the recomputation.
        ({"ram": 10, "deadline": 8}, "ram binds 1, time slack 0"),
        ({"ram": 10, "deadline": 7}, "ram binds 3, time binds 2"),
        # The quicker way needs 9 J.
        ({"ram": 10, "minimize": "time", "energy_budget": 9}, "ram binds 1, energy slack 0"),
        ({"ram": 10, "minimize": "time", "energy_budget": 8}, "ram binds 4, energy binds 3"),
        # A budget of the energy that is minimized saves nothing.
        ({"ram": 10, "energy_budget": 8}, "ram binds 1, energy slack 0"),
        # Nothing keeps these: `explain_infeasible` says why.
        ({"ram": 10, "deadline": 7, "energy_budget": 8}, ""),
    ],
)
def test_limit_binds_if_something_is_gained_without_it(limits, states):
    """For each stated limit: its state, and the saving without it."""
    found = find_used_limits(solve(priced_problem(**limits)))
    told = ", ".join(f"{each.quantity} {each.state} {each.saved:g}" for each in found)
    assert told == states
    assert all(each.saved == each.max_saved for each in found)


def test_amounts_of_a_limit_are_stated():
    """For each limit, its value and the amount that the schedule uses."""
    found = find_used_limits(solve(priced_problem(ram=10, deadline=7)))
    assert [(each.used, each.allowed) for each in found] == [(9, 10), (5.0, 7.0)]


@pytest.mark.parametrize(
    ("change", "states"),
    [
        (
            {"status": Status.UNKNOWN}
            | dict.fromkeys(("schedule", "simulation", "objective_bound")),
            [(LimitState.OPEN, None)] * 2,
        ),
        (
            {"termination": Termination.INTERRUPTED},
            [(LimitState.BINDS, 3), (LimitState.OPEN, None)],
        ),
    ],
)
def test_limits_without_a_proof_and_after_ctrl_c_are_open(monkeypatch, change, states):
    """An interrupted solve is the last one; later limits have no result."""
    result = solve(priced_problem(ram=10, deadline=7))
    monkeypatch.setattr(
        variants, "execute", lambda *arguments: replace(execute(*arguments), **change)
    )
    assert [(found.state, found.saved) for found in find_used_limits(result)] == states


def test_wants_for_their_own_sake_count():
    """A rule that requires a recomputation needs RAM, but RAM does not bind beyond that."""
    twice = skip_problem(ram=1000).subject_to(twice=lambda v: v.recomputations["a"] >= 2)
    (ram,) = find_used_limits(solve(twice))
    assert (ram.state, ram.saved) == (LimitState.SLACK, 0)
