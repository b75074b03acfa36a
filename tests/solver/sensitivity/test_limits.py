"""The smallest RAM, deadline and energy against the oracle, and which limits a schedule is at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.instances import random_instances
from kit.oracle import optimum
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.problem import Constraint, Problem, Quantity
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import Change, explain_infeasible, find_limits, variants
from poetmodel.solver.sensitivity.limits import LimitState, used_limits


def test_limits_of_a_graph_worked_out_by_hand() -> None:
    """Kept it takes 15 B at c, else 12 B at d, the minimum; with 13 B a is computed again: 11 s."""
    found = {limit.name: limit for limit in find_limits(skip_problem(deadline="150%"))}
    assert {name: limit.value for name, limit in found.items()} == {
        "keep_all": 15,
        "recompute": 12,
        "page": 12,
        "both": 12,
        "stated": 12,
        "time": 11.0,
        "energy": 11.0,
    }
    assert all(limit.proven and limit.gap == 0.0 for limit in found.values())
    assert [limit.at_floor for limit in found.values()][:2] == [False, True]
    kept = found["keep_all"].to_dict()
    assert (kept["node"], kept["stage"], kept["tensors"]) == ("c", 2, ["a", "b", "c"])
    assert (kept["value"], kept["bound"], kept["proven"]) == (15, 15.0, True)


def test_own_constraints_hold_where_all_limits_do() -> None:
    """Without any page-out a is computed again: 12 B do, but not where that is forbidden, too."""
    rows = (Constraint(name="no paging", terms={"bytes_written": 1}, upper=0),)
    problem = replace(skip_problem(), constraints=rows)
    found = {limit.name: limit.value for limit in find_limits(problem)}
    assert (found["both"], found["stated"], found["energy"]) == (12, 12, 11.0)
    once = Constraint(name="once", terms={"recomputations:a": 1}, upper=0)
    tight = replace(problem, constraints=(*rows, once), ram=15)
    found = {limit.name: limit.value for limit in find_limits(tight)}
    assert (found["both"], found["stated"], found["energy"]) == (12, 15, 10.0)


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        ({"paging": False}, ["keep_all", "recompute", "time", "energy"]),
        ({"recompute": False}, ["keep_all", "page", "time", "energy"]),
        ({"energy_budget": "200%"}, ["keep_all", "recompute", "page", "both", "stated"]),
    ],
)
def test_only_what_the_problem_allows_is_asked(
    choices: dict[str, object], names: list[str]
) -> None:
    """What is forbidden has no line, and further limits have one of their own."""
    found = [limit.name for limit in find_limits(skip_problem(**choices))]
    assert found[: len(names)] == names


def test_limits_are_those_of_an_exhaustive_search() -> None:
    """Each least amount is the oracle's, and what cannot be is infeasible."""
    for problem in random_instances(6, (3, 5), seed=7, deadline="140%"):
        for limit in find_limits(problem, gap=0.0):
            best = optimum(limit.result.problem)
            if best is None:
                assert limit.result.status == Status.INFEASIBLE
                assert (limit.value, limit.proven) == (None, True)
            else:
                assert limit.result.objective_value == pytest.approx(best.value, rel=1e-9)
                assert limit.proven


def test_what_is_wanted_for_its_own_sake_may_take_more_ram_than_keep_all() -> None:
    """Node b is computed twice more, each time beside its input, which is not computed again.

    Keep-all takes 20 B; at c, between the two, all of a, b and c are in RAM.
    """
    names = ("a", "b", "c", "d")
    reads = ((), ("a",), ("b",), ("c",))
    nodes = (
        operation(name, output_bytes=10, inputs=inputs, recomputable=name != "a")
        for name, inputs in zip(names, reads, strict=True)
    )
    graph = Graph(name="again", nodes=tuple(nodes))
    problem = Problem(graph, even_costs(graph), ram=30, paging=False)
    twice = problem.subject_to(twice=lambda v: v.recomputations["b"] >= 2)
    found = {limit.name: limit for limit in find_limits(twice)}
    assert (found["keep_all"].value, found["stated"].value) == (20, 30)
    assert found["stated"].proven
    (ram,) = used_limits(solve(twice))
    assert (ram.state, ram.used, ram.allowed) == (LimitState.SLACK, 30, 30)
    assert ram.without == solve(replace(twice, ram=1000)).energy_j
    less = explain_infeasible(solve(replace(twice, ram=20)))
    remedies = {remedy.change: remedy for remedy in less.remedies}
    assert (remedies[Change.RAM].works, remedies[Change.RAM].nearest) == (True, 30)


def test_tensors_without_bytes_take_no_ram() -> None:
    """Of nothing, nothing is the least."""
    nodes = (operation("a", output_bytes=0), operation("b", output_bytes=0, inputs=("a",)))
    graph = Graph(name="nothing", nodes=nodes)
    limits = find_limits(Problem(graph, even_costs(graph), ram=1))
    assert {limit.value for limit in limits if limit.quantity == Quantity.RAM} == {0}


def test_what_one_way_needs_is_not_taken_for_the_other() -> None:
    """Without room on storage paging needs all 15 B; recomputing and both still do with 12."""
    found = {limit.name: limit for limit in find_limits(skip_problem(aux_bytes=0))}
    assert {name: found[name].value for name in ("recompute", "page", "both")} == {
        "recompute": 12,
        "page": 15,
        "both": 12,
    }
    for limit in found.values():
        assert limit.bound is not None
        assert limit.value is not None
        assert limit.bound <= limit.value


def test_ctrl_c_ends_with_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted question is the last one."""
    stopped = replace(solve(skip_problem()), termination=Termination.INTERRUPTED)
    monkeypatch.setattr(variants, "solve", lambda *_, **__: stopped)
    assert [limit.name for limit in find_limits(skip_problem())] == ["keep_all"]


def test_ram_counts_what_is_resident() -> None:
    """With parameters counted, the least RAM is a budget that holds them too."""
    graph = Graph(name="heavy", nodes=skip_graph().nodes, resident_bytes={"parameters": 100})
    problem = Problem(graph, even_costs(graph), ram=113, count_parameters=True)
    found = {limit.name: limit for limit in find_limits(problem)}
    assert (found["both"].value, found["both"].bound) == (112, 112)
    assert found["both"].to_dict()["peak_ram_bytes"] == 12


def test_a_schedule_without_a_proof_is_not_called_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved of the loosest question about RAM is taken over; beyond it there is a gap."""
    real = variants.solve

    def unproved(problem: Problem, **options: object) -> object:
        result = real(problem, **options)  # type: ignore[arg-type]
        lower = 5.0 if problem.minimize == Quantity.RAM and not problem.paging else None
        if lower is None:
            return result
        return replace(result, objective_bound=lower)

    monkeypatch.setattr(variants, "solve", unproved)
    found = {limit.name: limit for limit in find_limits(skip_problem())}
    assert found["keep_all"].bound == 12
    assert not found["keep_all"].proven
    assert found["keep_all"].gap == pytest.approx(0.2)
    assert found["recompute"].proven


def priced_problem(**limits: Any) -> Problem:
    """Return a chain with a skip: a (4 B) is read by b and d; keeping it takes 12 B at c.

    Below that it is computed again for 1 s and 3 J, or paged for 4 s and 1 J. A pass: 4 s and 6 J.
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


def states(**limits: Any) -> dict[str, str]:
    """Return for each stated limit whether the best schedule is at it."""
    result = solve(priced_problem(**limits))
    return {str(found.quantity): str(found.state) for found in used_limits(result)}


def test_ram_is_at_its_limit_if_not_everything_fits() -> None:
    """With 10 B something must go; with 12 B nothing, and nothing is gained by more."""
    assert states(ram=10) == {"ram": "binds"}
    assert states(ram=12) == {"ram": "slack"}


def test_deadline_is_at_its_limit_if_it_rules_the_cheaper_way_out() -> None:
    """8 s are enough for paging, so more is no gain; 7 s force the recomputation."""
    assert states(ram=10, deadline=8) == {"ram": "binds", "time": "slack"}
    assert states(ram=10, deadline=7) == {"ram": "binds", "time": "binds"}


def test_energy_budget_is_at_its_limit_if_time_is_minimized() -> None:
    """The quicker way needs 9 J."""
    fast = {"ram": 10, "minimize": "time"}
    assert states(**fast, energy_budget=9) == {"ram": "binds", "energy": "slack"}
    assert states(**fast, energy_budget=8) == {"ram": "binds", "energy": "binds"}


def test_of_limits_that_exclude_each_other_all_are_in_the_way() -> None:
    """With 7 s and 8 J neither way is left; each limit gone, there is one."""
    assert states(ram=10, deadline=7, energy_budget=8) == {
        "ram": "binds",
        "time": "binds",
        "energy": "binds",
    }


def test_limits_that_nothing_can_keep_are_told_apart() -> None:
    """Deadline and energy are each too little for one pass; the RAM is not the obstacle."""
    assert states(ram=12, deadline=3, energy_budget=5) == {
        "ram": "slack",
        "time": "impossible",
        "energy": "impossible",
    }


def test_figures_are_used_and_allowed() -> None:
    """In bytes, seconds and joules, and what is minimized without the limit; d takes 9 B."""
    result = solve(priced_problem(ram=10, deadline=7))
    ram, time = used_limits(result)
    assert (ram.used, ram.allowed, ram.without) == (9, 10, 6.0)
    assert (time.used, time.allowed, time.without) == (5.0, 7.0, 7.0)


def test_without_a_proof_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solve without the limit proves nothing, the answer is open."""
    result = solve(priced_problem(ram=10, deadline=7))

    def unproved(problem: Problem, **options: Any) -> Any:
        found = solve(problem, **options)
        return replace(
            found, status=Status.UNKNOWN, schedule=None, simulation=None, objective_bound=None
        )

    monkeypatch.setattr("poetmodel.solver.sensitivity.variants.solve", unproved)
    assert {found.state for found in used_limits(result)} == {LimitState.OPEN}


def test_after_ctrl_c_the_other_limits_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted solve is the last one; nothing is claimed of the limits after it."""
    result = solve(priced_problem(ram=10, deadline=7))

    def interrupted(problem: Problem, **options: Any) -> Any:
        return replace(solve(problem, **options), termination=Termination.INTERRUPTED)

    monkeypatch.setattr(variants, "solve", interrupted)
    ram, time = used_limits(result)
    assert (ram.state, ram.without) == (LimitState.AT_LIMIT, 6.0)
    assert (time.state, time.without) == (LimitState.OPEN, None)
