"""``compact``, reduced or not, against exhaustive search: same optimum, same infeasibility.

Models are solved as they were built: without a start, without a schedule from elsewhere, and with
no tidying afterwards, so that only the model can be right. Every instance has its seed in its name.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kit.instances import random_instance, random_instances, seeded
from kit.oracle import optimum
from kit.rotation import Part, parts
from poetmodel.errors import PoetModelError
from poetmodel.model import build
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Status
from poetmodel.solver.monolithic import solve_model
from poetmodel.solver.outcome import finish
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult

QUICK = 4
"""Batches of `BATCH` instances of 3 to 5 nodes in the default run; the others are slow."""
BATCH = 40
SEED = "exact"


def solved(problem: Problem, *, reductions: bool = True) -> SolveResult:
    """Solve the bare model of a problem to the end."""
    request = Request(gap=0.0, time_limit_s=600.0)
    model = build(problem, reductions=reductions)
    outcome = solve_model(model, request, start=None, trimmed=False)
    result = finish(problem, request, outcome, formulation="compact")
    check_figures(problem, result)
    return result


def check_figures(problem: Problem, result: SolveResult) -> None:
    """Hold the model's own figures against the verifier's."""
    if result.schedule is None:
        return
    value = result.objective_value
    assert value is not None
    assert result.objective_bound is not None
    assert result.objective_bound <= value * (1 + 1e-9)
    said = problem.objective.baseline + result.statistics["model_value"]
    if problem.minimize == Quantity.RAM:  # the peak variable may be above the peak, never below
        assert said >= value - 1e-6
    else:
        assert said == pytest.approx(value, abs=1e-6)


def agrees(problem: Problem, *, reductions: bool = True) -> str:
    """Return what went wrong against exhaustive search, or nothing."""
    best = optimum(problem)
    try:
        result = solved(problem, reductions=reductions)
    except PoetModelError as error:
        return f"{type(error).__name__}: {error}"
    if best is None:
        return "" if result.status == Status.INFEASIBLE else f"infeasible, got {result.status}"
    if result.status != Status.OPTIMAL:
        return f"optimum {best.value}, got {result.status}"
    if result.objective_value != pytest.approx(best.value, abs=1e-6):
        return f"optimum {best.value}, got {result.objective_value}"
    return ""


def failures(problems: dict[str, Problem], *, reductions: bool = True) -> dict[str, str]:
    """Return the instances on which search and model differ, by seed."""
    found = {seed: agrees(problem, reductions=reductions) for seed, problem in problems.items()}
    return {seed: what for seed, what in found.items() if what}


def batch(
    number: int, count: int, n: tuple[int, int] = (3, 5), kind: str = ""
) -> dict[str, Problem]:
    """Return instances of one batch by seed, every option free."""
    seeds = [f"{SEED}{kind}/{number}/{i}" for i in range(count)]
    return {seed: random_instance(seeded(seed), n, below_floor=True) for seed in seeds}


@pytest.mark.parametrize("number", range(QUICK))
def test_compact_is_exact(number: int) -> None:
    """The least value and infeasibility are those of exhaustive search: 160 instances."""
    assert not failures(batch(number, BATCH))


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(QUICK, 75))
def test_compact_is_exact_on_more(number: int) -> None:
    """The same on 2,840 more."""
    assert not failures(batch(number, BATCH))


@pytest.mark.parametrize("number", range(1))
def test_unreduced_is_exact(number: int) -> None:
    """With every choice open, the model still has the optimum of exhaustive search: 40."""
    assert not failures(batch(number, BATCH, kind="-open"), reductions=False)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(1, 15))
def test_unreduced_is_exact_on_more(number: int) -> None:
    """The same on 560 more."""
    assert not failures(batch(number, BATCH, kind="-open"), reductions=False)


def test_compact_is_exact_on_six_nodes() -> None:
    """A few instances beyond what the other tests can afford."""
    assert not failures(batch(0, 15, (6, 6), "-six"))


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(1, 7))
def test_compact_is_exact_on_more_of_six_nodes(number: int) -> None:
    """The same on 90 more."""
    assert not failures(batch(number, 15, (6, 6), "-six"))


@parts(3)
def test_recomputation_alone_is_exact(part: Part) -> None:
    """Where early recomputations matter most: no paging, energy, five nodes."""
    problems = {
        f"{SEED}-again/{i}": random_instance(
            seeded(f"{SEED}-again/{i}"), 5, paging=False, recompute=True, minimize="energy"
        )
        for i in part.of(range(60))
    }
    assert not failures(problems)


@pytest.mark.parametrize("number", range(1))
def test_reductions_lose_nothing_on_larger_graphs(number: int) -> None:
    """Up to ten nodes, where nobody can search exhaustively, both models agree: 15."""
    for i, problem in enumerate(random_instances(15, (6, 10), seed=100 + number)):
        reduced, open_ = solved(problem), solved(problem, reductions=False)
        assert reduced.status == open_.status, (number, i)
        assert reduced.objective_value == pytest.approx(open_.objective_value, abs=1e-6), (
            number,
            i,
        )


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(1, 12))
def test_reductions_lose_nothing_on_more_larger_graphs(number: int) -> None:
    """The same on 165 more."""
    test_reductions_lose_nothing_on_larger_graphs(number)


def test_without_storage_it_only_recomputes() -> None:
    """No page costs are needed, with every choice open: 12."""
    options = {"storage": False, "on_aux": False, "deadline": False, "switches": False}
    problems = random_instances(12, (3, 5), seed=7, **options)
    assert not failures({f"7/{i}": p for i, p in enumerate(problems)}, reductions=False)


@parts(3)
def test_what_is_ruled_out_before_solving_is_infeasible(part: Part) -> None:
    """The reasons that need no solver are right: search finds nothing either."""
    count = 0
    for number in part.of(range(15)):
        for seed, problem in batch(number, BATCH).items():
            if obstacle(problem) is not None:
                assert optimum(problem) is None, seed
                count += 1
    assert count > part.share(10)


def test_instances_cover_every_option() -> None:
    """The first seeds reach each option many times."""
    seen: Counter[str] = Counter()
    for number in range(15):
        for problem in batch(number, BATCH).values():
            nodes = problem.graph.nodes
            seen.update(
                {
                    f"minimize {problem.minimize}": True,
                    f"deadline {problem.deadline_counts}": problem.deadline_s is not None,
                    "storage limit": problem.aux_limit_bytes is not None and problem.can_page,
                    "energy budget": problem.energy_budget_j is not None,
                    "no paging": not problem.paging,
                    "no recomputation": not problem.recompute,
                    "idle power": problem.idle_power_w > 0,
                    "on storage": any(node.on_aux for node in nodes),
                    "two outputs": any(len(node.outputs) > 1 for node in nodes),
                    "no output": any(not node.outputs for node in nodes),
                    "workspace": any(node.workspace_bytes for node in nodes),
                    "once only": any(not node.recomputable for node in nodes),
                    "zero bytes": 0 in problem.graph.tensor_bytes,
                    "below the floor": obstacle(problem) is not None,
                }
            )
    assert len(seen) == 18
    assert min(seen.values()) > 10, seen
