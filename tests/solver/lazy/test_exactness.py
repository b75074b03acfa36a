"""``lazy`` against exhaustive search and against ``compact``: same optimum, same infeasibility.

Nothing helps from outside: no start, and no row is enforced in the beginning, so that merged
stages, rows of stages and rows within stages must lead to the answer. Bare rounds (`lazy_rounds`)
have neither cuts nor a search for schedules beside them; the driver has both. Every instance has
its seed in its name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.instances import (
    random_costs,
    random_graph,
    random_instance,
    random_problem,
    scarce_problem,
    seeded,
)
from kit.oracle import optimum
from kit.relaxation import RoundsError, no_rows, random_rows, run_rounds
from kit.rotation import Part, parts
from kit.worked import early_recomputation
from poetmodel.errors import PoetModelError
from poetmodel.graph import Graph, floor
from poetmodel.model import build
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.solver.lazy import solve_lazily
from poetmodel.solver.monolithic import solve_model
from poetmodel.solver.outcome import finish
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from poetmodel.model.aggregated import Grouping
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult

BATCH = 50
"""Instances of a test."""
QUICK, ALL = 2, 40
"""Batches of 3 to 5 nodes in the default run, and with the slow tests."""
SEED = "lazy"

Answer = tuple[str, float | None]
"""What is claimed (optimal, infeasible), and the value beyond what every schedule pays."""


# -- the ways to an answer ---------------------------------------------------------------------


def by_search(problem: Problem) -> Answer:
    """Return the answer of exhaustive search."""
    best = optimum(problem)
    if best is None:
        return "infeasible", None
    return "optimal", best.value - problem.objective.baseline


def claim(problem: Problem, result: SolveResult) -> Answer:
    """Return what a result claims, once its own figures fit together."""
    value = result.objective_value
    if value is None:
        return str(result.status), None
    assert result.objective_bound is not None
    assert result.objective_bound <= value * (1 + 1e-9)
    assert not result.violations
    return str(result.status), value - problem.objective.baseline


def by_driver(problem: Problem, first: Grouping | None = None, *, threads: int = 1) -> Answer:
    """Return the answer of the driver that begins with nothing, by default not even a row."""
    request = Request(gap=0.0, time_limit_s=600.0, threads=threads)
    rows = no_rows(problem) if first is None else first
    outcome = solve_lazily(problem, request, start=None, first=rows)
    return claim(problem, finish(problem, request, outcome, formulation="lazy"))


def by_rounds(problem: Problem, first: Grouping | None = None) -> Answer:
    """Return the answer of bare rounds."""
    found = run_rounds(problem, first)
    return ("infeasible" if found.value is None else "optimal"), found.value


def by_compact(problem: Problem) -> Answer:
    """Return the answer of the whole model."""
    request = Request(gap=0.0, time_limit_s=600.0)
    outcome = solve_model(build(problem), request, start=None, trimmed=False)
    return claim(problem, finish(problem, request, outcome, formulation="compact"))


def differs(problem: Problem, wanted: Answer, way: Callable[[Problem], Answer]) -> str:
    """Return how the answer of one way differs from the right one, or nothing."""
    try:
        found = way(problem)
    except (PoetModelError, RoundsError) as error:
        return f"{type(error).__name__}: {error}"
    if found[0] != wanted[0] or found[1] != pytest.approx(wanted[1], abs=1e-6):
        return f"expected {wanted}, got {found}"
    return ""


def failures(
    problems: Iterable[tuple[str, Problem]],
    *ways: Callable[[Problem], Answer],
    reference: Callable[[Problem], Answer] = by_search,
) -> dict[str, list[str]]:
    """Return the instances on which a way and the reference differ, by seed."""
    found: dict[str, list[str]] = {}
    for seed, problem in problems:
        if obstacle(problem) is not None:  # known before anything is solved
            continue
        wanted = reference(problem)
        what = [said for way in ways if (said := differs(problem, wanted, way))]
        if what:
            found[seed] = what
    return found


# -- instances -----------------------------------------------------------------------------------


def scarce(
    number: int, n: int | tuple[int, int] = (3, 5), kind: str = "", count: int = BATCH, **fixed: Any
) -> list[tuple[str, Problem]]:
    """Return instances of one batch, with their seeds, in which RAM does not hold everything."""
    seeds = [f"{SEED}{kind}/{number}/{i}" for i in range(count)]
    return [(seed, scarce_problem(seed, n, **fixed)) for seed in seeds]


def any_kind(number: int, count: int = BATCH) -> list[tuple[str, Problem]]:
    """Return instances of one batch, of every kind, in most of which RAM does hold everything."""
    seeds = [f"{SEED}-any/{number}/{i}" for i in range(count)]
    return [(seed, random_instance(seeded(seed), (1, 5))) for seed in seeds]


def with_random_rows(seed: str) -> Callable[[Problem], Answer]:
    """Return bare rounds that begin with random rows, of steps too."""
    return lambda problem: by_rounds(problem, random_rows(seeded(f"rows of {seed}"), problem))


# -- against exhaustive search -------------------------------------------------------------------


@pytest.mark.parametrize("number", range(QUICK))
def test_bare_rounds_are_exact(number: int) -> None:
    """Merged stages and the rows added to them lead to the optimum of exhaustive search: 100."""
    assert not failures(scarce(number), by_rounds)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(QUICK, ALL))
def test_bare_rounds_are_exact_on_more(number: int) -> None:
    """The same on 1,900 more."""
    assert not failures(scarce(number), by_rounds)


@pytest.mark.parametrize("number", range(1))
def test_the_driver_is_exact(number: int) -> None:
    """So does the driver, with its cuts and its search for schedules: 50 of the same."""
    assert not failures(scarce(number), by_driver)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(1, ALL))
def test_the_driver_is_exact_on_more(number: int) -> None:
    """The same on the other 1,950."""
    assert not failures(scarce(number), by_driver)


@pytest.mark.parametrize("number", range(1))
def test_problems_of_every_kind_are_exact(number: int) -> None:
    """Down to a single node, and where everything fits: 50."""
    assert not failures(any_kind(number), by_rounds)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(1, 23))
def test_more_problems_of_every_kind_are_exact(number: int) -> None:
    """The same on 1,100 more, by the driver too."""
    assert not failures(any_kind(number), by_rounds, by_driver)


@pytest.mark.parametrize("number", range(1))
def test_rows_enforced_for_no_reason_change_nothing(number: int) -> None:
    """From whichever rows the rounds begin, of steps too, the optimum is the same: 50."""
    for seed, problem in scarce(number, kind="-rows"):
        assert not failures([(seed, problem)], with_random_rows(seed))


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(1, 22))
def test_rows_enforced_for_no_reason_change_nothing_on_more(number: int) -> None:
    """The same on 1,050 more."""
    test_rows_enforced_for_no_reason_change_nothing(number)


def test_six_nodes_are_exact() -> None:
    """A few instances beyond what the other tests can afford."""
    assert not failures(scarce(0, 6, "-six", 10), by_rounds, by_driver)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(13))
def test_more_of_six_nodes_are_exact(number: int) -> None:
    """The same on 640 more."""
    assert not failures(scarce(number, 6, "-six"), by_rounds, by_driver)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(4))
def test_seven_nodes_are_exact(number: int) -> None:
    """A hundred instances at the end of what can be searched."""
    assert not failures(scarce(number, 7, "-seven", 25), by_rounds, by_driver)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.seeds) for n in range(1, 5))]
)
def test_recomputation_alone_is_exact(number: int) -> None:
    """Where early recomputations matter most: no paging, energy."""
    options = {"paging": False, "recompute": True, "minimize": "energy"}
    assert not failures(scarce(number, 5, "-again", 10, **options), by_rounds, by_driver)


@pytest.mark.parametrize("minimize", list(Quantity))
def test_each_quantity_is_exact_with_two_threads(minimize: str) -> None:
    """Searching schedules beside the proof changes no answer, wherever the search has come to."""
    problems = scarce(0, 5, "-threads", 10, minimize=minimize)
    assert not failures(problems, lambda problem: by_driver(problem, threads=2))


@pytest.mark.parametrize("number", [1, 2])
def test_early_recomputations_are_found(number: int) -> None:
    """A recomputation in a stage that uses nothing of it, next to rows that are enforced, is found.

    Both graphs have overhead 1; stages with uses, and what they draw in, give 2 and 3.
    """
    problem = early_recomputation(number)
    assert by_search(problem) == ("optimal", 1.0)
    assert by_rounds(problem) == ("optimal", 1.0)
    assert by_driver(problem) == ("optimal", 1.0)


# -- against the whole model -------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1))
def test_lazy_agrees_with_compact(number: int) -> None:
    """On 8 to 12 nodes, half of the budgets close to the floor: 20 instances."""
    problems = scarce(number, (8, 12), "-large", 20)
    assert not failures(problems, by_driver, reference=by_compact)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(40))
def test_lazy_agrees_with_compact_on_more(number: int) -> None:
    """The same, and bare rounds on them, on 800."""
    problems = scarce(number, (8, 12), "-large", 20)
    assert not failures(problems, by_rounds, by_driver, reference=by_compact)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(10))
def test_lazy_agrees_with_compact_on_large_graphs(number: int) -> None:
    """On 14 to 18 nodes: 100 instances."""
    problems = scarce(number, (14, 18), "-huge", 10)
    assert not failures(problems, by_driver, reference=by_compact)


@parts(3)
def test_lazy_agrees_with_compact_on_workspaces(part: Part) -> None:
    """Every node needs workspace, so that the transients of each recomputation count: 20."""
    problems = []
    for i in part.of(range(20)):
        rng = seeded(f"{SEED}-spaces/{i}")
        nodes = [
            replace(node, workspace_bytes=rng.randint(1, 9))
            for node in random_graph(rng, (7, 10), density=0.3).nodes
        ]
        graph = Graph(name="spaces", nodes=tuple(nodes))
        ram = floor(graph).bytes + rng.randint(0, 3)
        problem = random_problem(rng, graph, random_costs(rng, graph), ram=ram, deadline=False)
        problems.append((f"{SEED}-spaces/{i}", problem))
    assert not failures(problems, by_rounds, by_driver, reference=by_compact)


# -- what the instances cover --------------------------------------------------------------------


def test_instances_cover_every_option() -> None:
    """The first seeds reach each option many times."""
    seen: Counter[str] = Counter()
    for number in range(6):
        for _, problem in scarce(number):
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
                    "workspace": any(node.workspace_bytes for node in nodes),
                    "once only": any(not node.recomputable for node in nodes),
                    "zero bytes": 0 in problem.graph.tensor_bytes,
                    "zero cost": 0 in problem.table.compute_energy_j,
                }
            )
    assert len(seen) == 17
    assert min(seen.values()) > 10, seen


def test_instances_decide_something() -> None:
    """Most of them cost something, some are infeasible, and rows of stages and steps come up."""
    stages, steps, costly, infeasible = 0, 0, 0, 0
    for _, problem in scarce(0):
        found = run_rounds(problem)
        stages += len(found.grouping.stage_rows)
        steps += len(found.grouping.step_rows)
        costly += found.value is not None and found.value > 0
        infeasible += found.value is None
    assert stages > 50
    assert steps > 2
    assert costly > 25
    assert infeasible > 1
