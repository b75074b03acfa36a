"""Own constraints and objectives in ``compact``: what each reduction leaves to them, by hand.

`test_exactness` holds both models against exhaustive search; here larger graphs, all three solvers,
and the waste that a limit or the objective can want.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.claims import wrong_claims
from kit.instances import random_instance, random_schedule, seeded
from kit.oracle import optimum
from kit.own_rows import constrained, with_random_rows
from kit.rotation import Part, parts
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.model import build
from poetmodel.model.events import dominated, recomputable_nodes, storage_is_limiting
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.schedule import simulate
from poetmodel.solver import solve
from poetmodel.solver.monolithic import build_and_solve
from poetmodel.solver.outcome import finish, verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule


def totals(problem: Problem, schedule: Schedule | None) -> tuple[dict[int, int], ...]:
    """Return the recomputations, page-ins and page-outs of a schedule."""
    assert schedule is not None
    done = simulate(problem.graph, problem.costs, schedule)
    return tuple(map(dict, (done.recomputations, done.page_ins, done.page_outs)))


def best(problem: Problem, **choices: Any) -> SolveResult:
    """Return the schedule of the reduced model, which the open one confirms."""
    result = solve(build(problem), gap=0.0, **choices)
    confirmed = solve(build(problem, reductions=False), gap=0.0)
    assert result.status == confirmed.status
    if confirmed.objective_value is not None:
        assert result.objective_value == pytest.approx(confirmed.objective_value, abs=1e-9)
    return result


# -- waste: what serves nothing but a limit or the objective ------------------------------------


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_a_node_is_recomputed_as_often_as_a_limit_wants(wanted: int) -> None:
    """`a` may be computed again in each of the three stages after its own, kept or not."""
    problem = skip_problem(ram=19).subject_to(again=lambda v: v.recomputations["a"] >= wanted)
    result = best(problem)
    assert totals(problem, result.schedule) == ({0: wanted}, {}, {})
    assert result.overhead_j == wanted


def test_what_nobody_reads_is_recomputed_and_paged_where_that_is_wanted() -> None:
    """`b` is made once more for its own sake, its inputs with it; `c` goes out and comes back."""
    graph = Graph(
        name="unread",
        nodes=(
            operation("a", output_bytes=2),
            operation("b", output_bytes=2, inputs=("a",)),
            operation("c", output_bytes=2),
            operation("d", output_bytes=2, inputs=("c",)),
            operation("e", output_bytes=2),
        ),
    )
    problem = Problem(graph, even_costs(graph), ram=8).subject_to(
        again=lambda v: v.recomputations["b"] >= 1,
        there=lambda v: v.page_ins["c"] >= 2,
        out=lambda v: v.page_outs["d"] == 1,
    )
    result = best(problem)
    again, read, written = totals(problem, result.schedule)
    assert (again, read, written) == ({1: 1}, {2: 2}, {2: 1, 3: 1})


def test_page_ins_that_are_wanted_need_the_tensor_gone_before() -> None:
    """Of three stages after the first each can page `a` in, once; storage is written once."""
    problem = skip_problem(ram=19).minimizing(lambda v: v.energy_j - 3 * v.page_ins["a"])
    result = best(problem)
    assert totals(problem, result.schedule) == ({}, {0: 3}, {0: 1})
    assert result.objective_value == 10 + 1 + 3 - 9
    assert result.objective_gap == 0.0


def test_what_lies_on_storage_can_be_paged_out_where_that_is_wanted() -> None:
    """It takes no room there, and its page-ins need none."""
    graph = skip_graph(on_aux=True)
    problem = Problem(graph, even_costs(graph), ram=13, aux_bytes=0)
    wanted = problem.subject_to(out=lambda v: v.page_outs["a"] >= 1)
    result = best(wanted)
    assert totals(wanted, result.schedule)[2] == {0: 1}
    # Paging in (1 J) or computing again (1 J) as before, and the page-out.
    assert result.overhead_j == best(problem).overhead_j + 1


def test_what_lies_on_storage_comes_in_without_a_page_out_that_may_be_wanted() -> None:
    """No cut of ``lazy`` takes the page-out of such a tensor for what its page-ins need."""
    graph = skip_graph(on_aux=True)
    costs = even_costs(graph, page_out=(1e9, 1e9))
    problem = Problem(graph, costs, ram=13).subject_to(
        there=lambda v: v.page_ins["a"] >= 3, any=lambda v: v.bytes_written >= 0
    )
    assert solve(problem, gap=0.0).overhead_j == best(problem).overhead_j == 3


def test_a_tensor_goes_out_once_however_much_that_is_rewarded() -> None:
    """Totals count a page-out once; a schedule with more is not valid for such a problem."""
    problem = skip_problem().minimizing(lambda v: -v.page_outs["b"])
    result = best(problem)
    assert result.objective_value == -1
    two = problem.subject_to(two=lambda v: v.page_outs["b"] >= 2)
    assert best(two).status == Status.INFEASIBLE


def test_without_paging_or_recomputation_nothing_is_wanted() -> None:
    """What a problem forbids is not offered, whatever a limit asks for."""
    for limits in ({"paging": False}, {"recompute": False}):
        problem = skip_problem(ram=19, **limits).minimizing(
            lambda v: v.energy_j - 3 * v.page_ins["a"] - 3 * v.recomputations["a"]
        )
        again, read, _ = totals(problem, best(problem).schedule)
        assert (again, read) == (({0: 3}, {}) if "paging" in limits else ({}, {0: 3}))


# -- dominance ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param(lambda v: v.page_ins["a"] <= 9, False, id="page-ins are limited"),
        pytest.param(lambda v: v.recomputations["a"] <= 9, True, id="recomputations are limited"),
        pytest.param(
            lambda v: v.recomputations["a"] >= 2 * v.page_ins["a"], False, id="they are wanted"
        ),
        pytest.param(
            lambda v: v.recomputations["a"] + v.page_outs["a"] <= 2 * v.page_ins["a"],
            True,
            id="a page-in that may not come takes nothing off",
        ),
        pytest.param(lambda v: v.page_ins["a"] >= 1, True, id="page-ins are wanted"),
        pytest.param(lambda v: v.bytes_written <= 100, False, id="writes are limited"),
        pytest.param(lambda v: v.page_ins["b"] <= 1, True, id="another tensor"),
    ],
)
def test_dominance_holds_in_every_row(rule: Any, expected: bool) -> None:
    """Paging replaces recomputation only where no row loses by it, rewards left aside."""
    graph = skip_graph()
    dear = even_costs(graph, page_in=(0.25, 0.25), page_out=(0.25, 0.25))
    problem = Problem(graph, dear, ram=13).subject_to(own=rule)
    assert dominated(problem, 0) is expected
    assert recomputable_nodes(problem)[0] is not expected
    assert best(problem).status == Status.OPTIMAL


def test_what_may_be_written_for_its_own_sake_counts_for_storage() -> None:
    """`d` is never read; 15 bytes hold all the others, but not `d` as well."""
    problem = skip_problem(aux_bytes=15)
    assert not storage_is_limiting(problem)
    assert storage_is_limiting(problem.subject_to(out=lambda v: v.page_outs["d"] >= 1))


# -- limits and objectives ---------------------------------------------------------------------


def test_an_equality_of_sums_that_cancel_holds_whatever_is_decided() -> None:
    """Three times the time is the energy, but for rounding errors of both sums."""
    graph = skip_graph()
    times = [0.1, 0.2, 0.3, 0.7]
    costs = Costs.from_arrays(
        graph, compute_time_s=times, compute_energy_j=[3 * value for value in times]
    )
    problem = Problem(graph, costs, ram=13).subject_to(even=lambda v: v.energy_j == 3 * v.compute_s)
    assert best(problem).overhead_j == pytest.approx(0.3)
    assert not any(any(column) for column in problem.wanted)


@pytest.mark.parametrize("backend", ["highs", "scip", "gurobi"])
@parts(2)
def test_all_solvers_agree_with_exhaustive_search(part: Part, backend: str) -> None:
    """Constraints of every kind, and own objectives with rewards."""
    found = []
    for seed in part.of(range(25)):
        rng = seeded(f"own/{backend}/{seed}")
        problem = constrained(rng, random_instance(rng, (3, 4)))
        expected = optimum(problem)
        request = Request(backend=backend, gap=0.0, time_limit_s=100.0)
        outcome = build_and_solve(problem, request, "compact", start=None)
        result = finish(problem, request, outcome, formulation="compact")
        assert (result.status == Status.INFEASIBLE) == (expected is None), seed
        if expected is not None:
            assert result.objective_value == pytest.approx(expected.value, abs=1e-6), seed
            assert result.objective_bound == pytest.approx(expected.value, abs=1e-6), seed
        found.append(result.status)
    assert found.count(Status.INFEASIBLE) < 20


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_reductions_lose_nothing_on_larger_graphs(number: int) -> None:
    """Up to eight nodes, where nobody can search exhaustively, neither model refutes the other."""
    optimal = 0
    free = dict.fromkeys(("deadline", "aux_limit", "energy_budget", "switches"), False)
    for place in range(20):
        rng = seeded(f"own/larger/{number}/{place}")
        problem = random_instance(rng, (6, 8), **free)
        schedule = random_schedule(rng, problem.graph, thrift=0.9)
        peak_bytes = simulate(problem.graph, problem.costs, schedule).peak_ram_bytes
        problem = with_random_rows(rng, replace(problem, ram=peak_bytes), schedule)
        results = [
            solve(build(problem, reductions=reductions), gap=0.0) for reductions in (True, False)
        ]
        schedules = (result.schedule for result in results)
        values = (verify_schedule(problem, each).value for each in schedules if each is not None)
        least = min(values, default=None)
        assert not any(wrong_claims(problem, result, least, gap=0.0) for result in results), place
        optimal += all(result.status == Status.OPTIMAL for result in results)
    assert optimal > 10
