"""Counting equal decisions: the same points and values, with fewer ways to spread a fraction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.instances import scarce_problem, seeded
from kit.relaxation import CLOSE, random_rows, relaxation_of
from kit.rotation import Part, parts
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm
from poetmodel.device import Costs
from poetmodel.problem import Problem, Quantity
from poetmodel.solver import solve
from poetmodel.solver.lazy import symmetry
from poetmodel.solver.lazy.symmetry import CountedForm, count_equal

if TYPE_CHECKING:
    from collections.abc import Iterator


def counted_form(form: StandardForm, cutoff: float | None) -> CountedForm | None:
    """Count the decisions that take more than 2 % of a limit."""
    return count_equal(form, cutoff, least_part=0.02)


def small_form() -> StandardForm:
    """Return a form of four binaries, three of them equal: cover two of them, within a limit."""
    return StandardForm.from_arrays(
        [[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 1.0]],
        [3.0, 3.0, 3.0, 1.0],
        upper=1.0,
        integer=True,
        row_lower=[2.0, -np.inf],
        row_upper=[np.inf, 5.0],
        rows=["need", "deadline"],
    )


def alike_problem(seed: str, n: tuple[int, int]) -> Problem:
    """Return a problem under a deadline in which many nodes and tensors cost the same."""
    scarce = scarce_problem(seed, n)
    graph, rng = scarce.graph, seeded(seed)
    page = [(1.0, float(rng.choice((1, 2)))) for _ in graph.tensors]
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1.0] * len(graph.nodes),
        compute_energy_j=[float(rng.choice((2, 5))) for _ in graph.nodes],
        page_in=page,
        page_out=page,
    )
    deadline = len(graph.nodes) + rng.randint(1, 6)
    ram = scarce.ram_budget_bytes
    return Problem(graph, costs, ram=ram, deadline=deadline, deadline_counts="serial")


def limited_forms(count: int, n: tuple[int, int]) -> Iterator[tuple[str, StandardForm]]:
    """Yield relaxations of such problems, from random rows."""
    for number in range(count):
        seed = f"counting {number}"
        problem = alike_problem(seed, n)
        yield seed, relaxation_of(problem, random_rows(seeded(seed), problem)).form


def least(form: StandardForm, **targets: float) -> float | None:
    """Return the least value of a form; None where there is no point."""
    raw = backend("highs").solve(form, Limits(rel_gap=0.0, **targets))
    assert raw.x is not None or raw.infeasible or raw.status == "cutoff"
    return raw.objective


def test_points_are_extended() -> None:
    """Points are extended."""
    counted = counted_form(small_form(), None)
    assert counted is not None
    point = counted.point(np.array([1.0, 0.0, 0.0, 1.0]))
    assert point is not None
    assert point.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert counted.point(np.array([1.0, 1.0, 1.0, 0.0])) is None
    assert counted.point(None) is None


def test_one_branching_on_a_counter_settles_what_half_a_decision_left_open() -> None:
    """One branching on a counter settles what half a decision left open."""
    # Three decisions of 3 each, two and a half of them needed: 7.5, whichever are taken.
    form = StandardForm.from_arrays(
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
        [3.0] * 3,
        upper=1.0,
        integer=True,
        row_lower=[2.5, -np.inf],
        row_upper=[np.inf, 3.0],
        rows=["need", "deadline"],
    )
    counted = counted_form(form, None)
    assert counted is not None
    relaxed = counted.form.relaxed()
    assert least(relaxed) == pytest.approx(7.5)
    third = counted.tallies[0].counters[2]
    for value, expected in ((0.0, None), (1.0, 9.0)):
        bounds = {"lower": relaxed.lower.copy(), "upper": relaxed.upper.copy()}
        for array in bounds.values():
            array[third] = value
        found = least(replace(relaxed, **bounds))
        assert found == (expected if expected is None else pytest.approx(expected))


@pytest.mark.slow
def test_counted_forms_have_the_same_least_value() -> None:
    """Counted forms have the same least value."""
    compared = 0
    for seed, form in limited_forms(120, (8, 14)):
        counted = counted_form(form, None)
        if counted is None:
            continue
        one, other = least(form), least(counted.form)
        assert (one is None) == (other is None), seed
        if one is not None and other is not None:
            assert other == pytest.approx(one, abs=CLOSE), seed
        compared += 1
    assert compared > 60


@parts(3)
def test_so_they_have_below_a_cutoff_and_nothing_is_found_where_nothing_is(part: Part) -> None:
    """So they have below a cutoff and nothing is found where nothing is."""
    compared = 0
    for seed, form in part.of(limited_forms(60, (8, 14))):
        best = least(form)
        if best is None or best <= form.offset + CLOSE:
            continue
        above, below = best + 1e-6 * (1 + abs(best)), best - 0.5 * (best - form.offset)
        counted = counted_form(form, above)
        if counted is not None:
            assert least(counted.form) == pytest.approx(best, abs=CLOSE), seed
            compared += 1
        tight = counted_form(form, below)
        if tight is not None:
            assert least(tight.form, objective_cutoff=below) is None, seed
    assert compared > part.share(20)


@parts(2)
def test_points_keep_value_and_rows(part: Part) -> None:
    """Points keep value and rows."""
    extended = 0
    for seed, form in part.of(limited_forms(40, (8, 14))):
        counted = counted_form(form, None)
        if counted is None:
            continue
        rng = np.random.default_rng(len(seed))
        priced = replace(form, objective=rng.random(form.n_columns))
        raw = backend("highs").solve(priced, Limits(rel_gap=0.0))
        if raw.x is None:
            continue
        point = counted.point(raw.x)
        assert point is not None, seed
        assert counted.form.violation(point) <= CLOSE, seed
        assert counted.form.value(point) == pytest.approx(form.value(raw.x)), seed
        extended += 1
    assert extended > part.share(20)


@pytest.mark.parametrize(
    "number", [*range(6), *(pytest.param(n, marks=pytest.mark.seeds) for n in range(6, 40))]
)
def test_the_driver_ends_with_the_value_of_compact(number: int) -> None:
    """The driver ends with the value of compact."""
    problem = alike_problem(f"counted {number}", (9, 16))
    expected = solve(problem, formulation="compact", gap=0.0)
    result = solve(problem, gap=0.0)
    assert (result.schedule is None) == (expected.schedule is None)
    if result.overhead_j is not None:
        assert result.overhead_j == pytest.approx(expected.overhead_j, abs=CLOSE)
        assert result.overhead_bound_j == pytest.approx(expected.overhead_j, abs=CLOSE)


def test_most_of_these_problems_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these problems are counted."""
    counted: list[bool] = []

    def watched(form: StandardForm, cutoff: float | None, **given: float) -> CountedForm | None:
        found = count_equal(form, cutoff, **given)
        counted.append(found is not None)
        return found

    monkeypatch.setattr(symmetry, "count_equal", watched)
    for number in range(10):
        solve(alike_problem(f"counted {number}", (9, 16)), gap=0.0)
    assert sum(counted) > len(counted) / 2


def test_without_a_limit_relaxations_are_not_counted() -> None:
    """Without a limit relaxations are not counted."""
    counted = 0
    for number in range(10):
        problem = alike_problem(f"counted {number}", (9, 16))
        grouping = random_rows(seeded(number), problem)
        free = problem.without(Quantity.TIME)
        counted += counted_form(relaxation_of(problem, grouping).form, None) is not None
        assert counted_form(relaxation_of(free, grouping).form, None) is None
    assert counted > 4
