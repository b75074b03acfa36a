"""The smallest RAM, deadline and energy against the oracle, and which limits a schedule is at."""

from dataclasses import replace

import pytest

from kit.instances import random_instances
from kit.oracle import optimum
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.graph import Graph, operation
from poetmodel.problem import Constraint, Problem, Quantity
from poetmodel.result import Status, Termination
from poetmodel.schedule import simulate
from poetmodel.solver import solve
from poetmodel.solver.facade import execute
from poetmodel.solver.request import SearchOptions
from poetmodel.solver.sensitivity import Change, explain_infeasible, find_limits, variants
from poetmodel.solver.sensitivity.variants import Variants


def test_limits_of_a_graph_worked_out_by_hand():
    """Keep-all needs 15 B at c, else 12 B at d, the minimum; with 13 B, a is recomputed: 11 s.

    Without any page-out, 12 B suffice, but not if recomputation is forbidden, too. For tensors
    of 0 bytes the minimum is 0. Without storage, paging needs all 15 B. Resident bytes count.
    """
    found = {limit.name: limit for limit in find_limits(skip_problem(deadline="150%"))}
    least = {"keep_all": 15, "recompute": 12, "page": 12, "both": 12, "stated": 12}
    assert {name: limit.value for name, limit in found.items()} == least | {
        "time": 11.0,
        "energy": 11.0,
    }
    assert all(limit.proven and limit.gap == 0.0 for limit in found.values())
    assert [limit.is_at_floor for limit in found.values()][:2] == [False, True]
    kept = found["keep_all"].to_dict()
    assert (kept["node"], kept["stage"], kept["tensors"]) == ("c", 2, ["a", "b", "c"])
    assert (kept["value"], kept["bound"], kept["proven"]) == (15, 15.0, True)
    rows = (Constraint(name="no paging", terms={"bytes_written": 1}, upper=0),)
    once = Constraint(name="once", terms={"recomputations:a": 1}, upper=0)
    problem = replace(skip_problem(), constraints=rows)
    tight = replace(problem, constraints=(*rows, once), ram=15)
    for stated, least in ((problem, [12, 12, 11.0]), (tight, [12, 15, 10.0])):
        found = {limit.name: limit.value for limit in find_limits(stated)}
        assert [found[name] for name in ("both", "stated", "energy")] == least
    nodes = (operation("a", output_bytes=0), operation("b", output_bytes=0, inputs=("a",)))
    graph = Graph(name="nothing", nodes=nodes)
    limits = find_limits(Problem(graph, even_costs(graph), ram=1))
    assert {limit.value for limit in limits if limit.quantity == Quantity.RAM} == {0}
    found = {limit.name: limit for limit in find_limits(skip_problem(aux_bytes=0))}
    assert [found[name].value for name in ("recompute", "page", "both")] == [12, 15, 12]
    assert all(limit.bound <= limit.value for limit in found.values())
    graph = Graph(name="heavy", nodes=skip_graph().nodes, resident_bytes={"parameters": 100})
    problem = Problem(graph, even_costs(graph), ram=113, count_parameters=True)
    found = {limit.name: limit for limit in find_limits(problem)}
    assert (found["both"].value, found["both"].bound) == (112, 112)
    assert found["both"].to_dict()["peak_ram_bytes"] == 12


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        ({"paging": False}, ["keep_all", "recompute", "time", "energy"]),
        ({"recompute": False}, ["keep_all", "page", "time", "energy"]),
        ({"energy_budget": "200%"}, ["keep_all", "recompute", "page", "both", "stated"]),
    ],
)
def test_only_what_the_problem_allows_is_asked(choices, names):
    """Forbidden decisions have no line, and further limits have one of their own."""
    found = [limit.name for limit in find_limits(skip_problem(**choices))]
    assert found[: len(names)] == names


def test_limits_are_those_of_an_exhaustive_search():
    """Each minimum is that of the exhaustive search, and impossible ones are infeasible."""
    for problem in random_instances(6, (3, 5), seed=7, deadline="140%"):
        for limit in find_limits(problem, gap=0.0):
            best = optimum(limit.result.problem)
            if best is None:
                assert limit.result.status == Status.INFEASIBLE
                assert (limit.value, limit.proven) == (None, True)
            else:
                assert limit.result.value == pytest.approx(best.value, rel=1e-9)
                assert limit.proven


def test_what_is_wanted_for_its_own_sake_may_take_more_ram_than_keep_all():
    """Node b is recomputed twice, each time beside its input, which is not recomputed.

    Keep-all needs 20 B; at c, between the two, all of a, b and c are in RAM.
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
    less = explain_infeasible(solve(replace(twice, ram=20)))
    remedies = {remedy.change: remedy for remedy in less.remedies}
    assert (remedies[Change.RAM].works, remedies[Change.RAM].nearest) == (True, 30)


def test_ctrl_c_ends_with_what_was_answered(monkeypatch):
    """An interrupted question is the last one."""
    stopped = replace(solve(skip_problem()), termination=Termination.INTERRUPTED)
    monkeypatch.setattr(variants, "execute", lambda *_, **__: stopped)
    assert [limit.name for limit in find_limits(skip_problem())] == ["keep_all"]


# -- variants of a problem -------------------------------------------------------------------------
def recorded(monkeypatch):
    """Record the options of each solve."""
    calls = []

    def record(problem, request, start=None):
        calls.append({"problem": problem, "time_limit": request.time_limit_s, "start": start})
        return execute(problem, request, start)

    monkeypatch.setattr(variants, "execute", record)
    return calls


def test_best_valid_schedule_so_far_is_the_start(monkeypatch):
    """Not the one that breaks a limit of the next variant, nor one of another objective."""
    calls = recorded(monkeypatch)
    roomy, tight = skip_problem(ram=15), skip_problem(ram=13)
    fast = skip_problem(ram=13, minimize="time")
    problems = (roomy, tight, skip_problem(ram=14), fast)
    solves = Variants(len(problems), SearchOptions(time_limit_s=9))
    results = [solves.solve(problem) for problem in problems]
    assert [call["start"] for call in calls] == [None, None, results[1].schedule, None]


def test_time_is_shared_and_none_goes_without(monkeypatch):
    """Unused time is shared by the next ones; without time, each gets the minimum."""
    calls = recorded(monkeypatch)
    problem, three = skip_problem(), Variants(3, SearchOptions(time_limit_s=30))
    shares = [three.solve(problem) and calls[-1]["time_limit"] for _ in range(3)]
    assert 9 < shares[0] <= 10
    assert 10 < shares[1] <= 15
    assert 15 < shares[2] <= 30
    late = Variants(3, SearchOptions(time_limit_s=1e-9), min_s=0.5)
    assert [late.solve(problem) and calls[-1]["time_limit"] for _ in range(3)] == [0.5] * 3
    skipped = Variants(2, SearchOptions(time_limit_s=30))
    skipped.skip()
    assert skipped.solve(problem)
    assert 29 < calls[-1]["time_limit"] <= 30


def test_paging_first_reaches_the_minimum_ram(monkeypatch):
    """The start then needs exactly the minimum RAM; without storage, there is none."""
    calls = recorded(monkeypatch)
    for aux, peak in ((None, 12), (0, None)):
        problem = skip_problem(aux_bytes=aux).without_limits(Quantity.RAM, minimize=Quantity.RAM)
        Variants(1, SearchOptions(time_limit_s=20)).solve(problem, tries_paging_first=True)
        start = calls[-1]["start"]
        found = start and simulate(problem.graph, None, start).peak_ram_bytes
        assert found == peak
        assert calls[-1]["time_limit"] <= 10
