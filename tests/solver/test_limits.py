"""The smallest RAM, deadline and energy: against the oracle, with the proof and what binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instances import random_instances
from oracle import optimum
from poetmodel.graph import Graph
from poetmodel.problem import Problem, Quantity
from poetmodel.result import Status, Termination
from poetmodel.schedule import simulate
from poetmodel.solver import limits as module
from poetmodel.solver import solve
from poetmodel.solver.limits import find_limits, freed, paged_at_floor
from worked import even_costs, skip_graph, skip_problem


def test_limits_of_a_graph_worked_out_by_hand() -> None:
    """Kept it takes 15 B at c, else the floor of 12 B at d; with 13 B a is computed anew: 11 s."""
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


def test_what_one_way_needs_is_not_taken_for_the_other() -> None:
    """Without room on storage paging needs all 15 B; recomputing and both still do with 12."""
    found = {limit.name: limit for limit in find_limits(skip_problem(aux_bytes=0))}
    assert {name: found[name].value for name in ("recompute", "page", "both")} == {
        "recompute": 12,
        "page": 15,
        "both": 12,
    }
    for limit in found.values():
        assert limit.least is not None
        assert limit.value is not None
        assert limit.least <= limit.value


def test_ctrl_c_ends_with_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted question is the last one."""
    stopped = replace(solve(skip_problem()), termination=Termination.INTERRUPTED)
    monkeypatch.setattr(module, "solve", lambda *_, **__: stopped)
    assert [limit.name for limit in find_limits(skip_problem())] == ["keep_all"]


def test_ram_counts_what_is_resident() -> None:
    """With parameters counted, the least RAM is a budget that holds them too."""
    graph = Graph(name="heavy", nodes=skip_graph().nodes, resident_bytes={"parameters": 100})
    problem = Problem(graph, even_costs(graph), ram=113, count_parameters=True)
    found = {limit.name: limit for limit in find_limits(problem)}
    assert (found["both"].value, found["both"].least) == (112, 112)
    assert found["both"].to_dict()["peak_ram_bytes"] == 12


def test_a_schedule_without_a_proof_is_not_called_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved of the loosest question about RAM is taken over; beyond it there is a gap."""
    real = module.solve

    def unproved(problem: Problem, **options: object) -> object:
        result = real(problem, **options)  # type: ignore[arg-type]
        lower = 5.0 if problem.minimize == Quantity.RAM and not problem.paging else None
        if lower is None:
            return result
        return replace(result, objective_bound=lower)

    monkeypatch.setattr(module, "solve", unproved)
    found = {limit.name: limit for limit in find_limits(skip_problem())}
    assert found["keep_all"].bound == 12
    assert not found["keep_all"].proven
    assert found["keep_all"].gap == pytest.approx(0.2)
    assert found["recompute"].proven


def test_paging_alone_reaches_the_floor_or_nothing_is_said() -> None:
    """The schedule takes exactly the floor; without room on storage there is none."""
    problem = freed(skip_problem(), Quantity.RAM)
    schedule = paged_at_floor(problem, time_limit=10.0)
    assert schedule is not None
    assert simulate(problem.graph, problem.costs, schedule).peak_ram_bytes == 12
    assert paged_at_floor(skip_problem(aux_bytes=0), time_limit=10.0) is None


def test_freed_problem_keeps_its_other_limits() -> None:
    """Only the limit on what is minimized goes."""
    problem = skip_problem(deadline=12, energy_budget=20, aux_bytes=4)
    assert freed(problem, Quantity.RAM).ram_budget_bytes == 15
    assert freed(problem, Quantity.RAM).deadline_s == 12
    assert freed(problem, Quantity.TIME).deadline_s is None
    assert freed(problem, Quantity.TIME).ram_budget_bytes == 13
    assert freed(problem, Quantity.ENERGY).energy_budget_j is None
    assert freed(problem, Quantity.WRITES).aux_limit_bytes == 18
