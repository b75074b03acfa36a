"""Own constraints and objectives against exhaustive search: every way to an answer, every solver.

What a result claims must hold: its schedule keeps the rows, is the best there is, no bound is above
the optimum, and "infeasible" is said only where the search finds nothing. Every instance has its
seed in its name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import pytest

import poetmodel as pm
from kit.claims import ROW_WAYS, answer, row_faults
from kit.oracle import optimum
from kit.own_rows import larger_own_rows_problem, own_rows_problem
from kit.rotation import Part, parts
from poetmodel.backends.registry import backend
from poetmodel.errors import ModelError
from poetmodel.problem import OWN
from poetmodel.schedule import verify

BACKENDS: Final = tuple(
    pytest.param(name, marks=pytest.mark.skipif(not backend(name).available(), reason="missing"))
    for name in ("highs", "scip", "gurobi")
)
QUICK, BATCH, ALL = 60, 100, 6
"""Instances of the quick sample; of each slow test; and how many of those each way."""


def seeds(number: int, count: int, kind: str = "own") -> list[str]:
    """Return the seeds of one batch."""
    return [f"{kind}/{number}/{i}" for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ROW_WAYS)
def test_own_rows_are_exact(way: str) -> None:
    """Thirty instances each way."""
    assert not row_faults(seeds(0, QUICK // 2), way)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS[1:])
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_own_rows_are_exact_by_other_solvers(way: str, name: str) -> None:
    """Fifteen of them by each."""
    assert not row_faults(seeds(0, QUICK // 4), way, backend=name)


@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_a_wide_gap_promises_no_more_than_it_says(way: str) -> None:
    """At a gap of one half the value is that near, and bounds on the way are below the optimum."""
    assert not row_faults(seeds(1, QUICK // 6), way, gap=0.5)


def test_two_threads_change_no_answer() -> None:
    """Searching for schedules beside the proof."""
    assert not row_faults(seeds(2, 6), "lazy", threads=2)


def test_no_time_is_no_excuse() -> None:
    """What is said after a fraction of the time is true as well."""
    assert not row_faults(seeds(3, QUICK // 6), "lazy", time_limit=0.02)
    assert not row_faults(seeds(3, QUICK // 6), "compact", time_limit=0.02)


@parts(4)
def test_schedules_of_the_paper_keep_own_rows(part: Part) -> None:
    """Its memory is another one, but whatever it finds keeps the rows."""
    stated = {"minimize": "energy", "deadline_counts": "compute", "recompute": True, "paging": True}
    limits = {"aux_bytes": None, "energy_budget": None}
    checked = 0
    for seed in part.of(seeds(4, 2 * QUICK)):
        problem = own_rows_problem(seed, **stated, **limits)
        try:
            result = answer(problem, "paper", gap=0.0)
        except ModelError:  # it cannot state every problem
            continue
        if result.schedule is None:
            continue
        found = verify(problem, result.schedule)
        assert found.violations == result.violations
        assert not [said for said in found.violations if said.startswith("constraint")], seed
        best = optimum(problem)
        if not found.violations:
            assert best is not None, seed
            assert problem.objective.measured(found.simulation) >= best.value - 1e-6, seed
        checked += 1
    assert checked > part.share(10)


def disagreements(numbers: range, kind: str) -> dict[str, str]:
    """Return the larger instances on which ``lazy`` and ``compact`` differ, by seed."""
    found = {}
    for number in numbers:
        seed = f"{kind}/{number}"
        problem = larger_own_rows_problem(seed, kind)
        lazy, compact = (answer(problem, way, gap=0.0) for way in ("lazy", "compact"))
        near = pytest.approx(compact.objective_value, abs=1e-6)
        if lazy.status != compact.status or lazy.objective_value != near:
            found[seed] = f"lazy {lazy.summary()}, compact {compact.summary()}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scarce", "alike", "twins"])
def test_lazy_and_compact_agree_on_larger_graphs(kind: str) -> None:
    """Where nobody can search exhaustively, equal decisions among them: 45."""
    assert not disagreements(range(15), kind)


# -- more of them ----------------------------------------------------------------------------------


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(10, 10 + ALL))
@pytest.mark.parametrize("way", ROW_WAYS)
def test_own_rows_are_exact_on_more(way: str, number: int) -> None:
    """Six hundred more each way, 3,000 in all."""
    assert not row_faults(seeds(number, BATCH), way)


@pytest.mark.seeds
@pytest.mark.parametrize("name", BACKENDS[1:])
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_own_rows_are_exact_by_other_solvers_on_more(way: str, name: str) -> None:
    """Two hundred more by each."""
    assert not row_faults(seeds(20, 2 * BATCH), way, backend=name)


@pytest.mark.seeds
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_wide_gaps_and_short_times_promise_no_more_on_more(way: str) -> None:
    """A hundred each, with a gap of one half, with one of a tenth, and with hardly any time."""
    assert not row_faults(seeds(1, BATCH), way, gap=0.5)
    assert not row_faults(seeds(22, BATCH), way, gap=0.1)
    assert not row_faults(seeds(23, BATCH), way, time_limit=0.05)


@pytest.mark.seeds
@pytest.mark.parametrize("kind", ["scarce", "alike", "twins"])
def test_lazy_and_compact_agree_on_more_larger_graphs(kind: str) -> None:
    """The same on 300 more."""
    assert not disagreements(range(15, 115), kind)


@pytest.mark.seeds
def test_two_threads_change_no_answer_on_more() -> None:
    """Forty."""
    assert not row_faults(seeds(24, 40), "lazy", threads=2)


@pytest.mark.seeds
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_own_rows_are_exact_on_six_nodes(way: str) -> None:
    """A few beyond what the other tests can afford."""
    assert not row_faults(seeds(25, 40), way, lambda seed: own_rows_problem(seed, 6))


# -- what the instances cover --------------------------------------------------------------------


@pytest.mark.slow
def test_instances_cover_every_kind_of_row() -> None:
    """The seeds of the quick run reach each many times, and rows decide what is best."""
    seen: Counter[str] = Counter()
    for seed in [*seeds(0, QUICK), *seeds(10, BATCH)]:
        problem = own_rows_problem(seed)
        nodes, rows = problem.graph.nodes, problem.constraints
        best = optimum(problem)
        plain = "energy" if problem.minimize == OWN else problem.minimize
        free = optimum(replace(problem, constraints=(), own_objective=(), minimize=plain))
        same = problem.minimize != OWN and best is not None and free is not None
        keys = [key for row in rows for key in row.terms]
        weights = [weight for row in rows for weight in row.terms.values()]
        seen.update(
            {
                f"minimize {problem.minimize}": True,
                "infeasible for its rows": best is None and free is not None,
                "rows cost": same and best.value > free.value + 1e-6,
                "rewards": any(weight < 0 for _, weight in problem.own_objective),
                "lower limit": any(row.upper is None for row in rows),
                "upper limit": any(row.lower is None for row in rows),
                "equal": any(row.lower == row.upper for row in rows),
                "range": any(None not in (row.lower, row.upper) for row in rows),
                "negative": any(weight < 0 for weight in weights),
                "several": len(rows) > 2,
                "counts": any(":" in key for key in keys),
                "bytes": any(key.startswith("bytes") for key in keys),
                "figures": any(key in ("energy_j", "compute_s", "transfer_s") for key in keys),
                "waste": best is not None
                and {i for _, i in best.schedule.M_out} > {i for _, i in best.schedule.M_in},
                f"deadline {problem.deadline_counts}": problem.deadline_s is not None,
                "storage limit": problem.aux_limit_bytes is not None and problem.can_page,
                "no paging": not problem.paging,
                "no recomputation": not problem.recompute,
                "on storage": any(node.on_aux for node in nodes),
                "two outputs": any(len(node.outputs) > 1 for node in nodes),
                "zero bytes": 0 in problem.graph.tensor_bytes,
            }
        )
    assert len(seen) == 26
    assert min(seen.values()) >= 8, seen


def test_equal_blocks_of_a_network_are_proved() -> None:
    """Recomputations that only equality wants fit into few stages: those are found in the end."""
    graph = pm.zoo.mlp(hidden=(512,) * 4, batch_size=64)
    costs = pm.Costs.estimate(graph, pm.Device.load("nrf52840"))
    problem = pm.Problem(graph, costs, ram="65%", deadline="250%").subject_to(
        blocks=lambda v: [v.recomputations[f"relu{b}"] == v.recomputations["relu2"] for b in (3, 4)]
    )
    result = pm.solve(problem)
    assert result.status == "optimal"
    assert result.overhead_j == pytest.approx(0.171157305696, rel=1e-4)
