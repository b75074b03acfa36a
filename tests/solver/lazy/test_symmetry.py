"""Counting equal decisions: the same points and values, with fewer ways to spread a fraction."""

from dataclasses import replace

import numpy as np
import pytest

from kit.claims import find_fault, solve_by_compact
from kit.instances import make_rng, scarce_problem
from kit.own_rows import equalize_costs
from kit.relaxation import SOLVER_TOLERANCE, find_minimum, make_relaxation, random_rows
from kit.rotation import parametrize_parts
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm
from poetmodel.problem import Quantity
from poetmodel.solver.lazy import symmetry
from poetmodel.solver.lazy.symmetry import count_equal_columns


def counted_form(form, cutoff):
    """Count the decisions that need more than 2 % of a limit."""
    return count_equal_columns(form, cutoff, min_use_ratio=0.02)


def small_form():
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


def alike_problem(seed, n):
    """Return a problem in which many decisions are equal."""
    return equalize_costs(make_rng(seed), scarce_problem(seed, n))


def limited_forms(count, n):
    """Yield relaxations of such problems, from random rows."""
    for number in range(count):
        seed = f"counting {number}"
        problem = alike_problem(seed, n)
        yield seed, make_relaxation(problem, random_rows(make_rng(seed), problem)).form


def test_counted_forms_by_hand():
    """Points are extended by their counters, unless they exceed a limit.

    One branching on a counter excludes half a decision: both sides are integral.
    """
    counted = counted_form(small_form(), None)
    point = counted.extend_point(np.array([1.0, 0.0, 0.0, 1.0]))
    assert point.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert counted.extend_point(np.array([1.0, 1.0, 1.0, 0.0])) is None
    assert counted.extend_point(None) is None
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
    relaxed = counted.form.linear_relaxation()
    assert find_minimum(relaxed) == pytest.approx(7.5)
    third = counted.counted_classes[0].counters[2]
    for value, expected in ((0.0, None), (1.0, 9.0)):
        bounds = {"lower": relaxed.lower.copy(), "upper": relaxed.upper.copy()}
        for array in bounds.values():
            array[third] = value
        found = find_minimum(replace(relaxed, **bounds))
        assert found == (expected if expected is None else pytest.approx(expected))


@parametrize_parts(4)
def test_counted_forms_have_the_same_least_value(part):
    """Also below a cutoff; if no point is below it, none is found."""
    compared = cut = 0
    for seed, form in part.select(limited_forms(120, (8, 14))):
        counted, best = counted_form(form, None), find_minimum(form)
        if counted is not None:
            assert find_minimum(counted.form) == pytest.approx(best, abs=SOLVER_TOLERANCE), seed
            compared += 1
        if best is None or best <= form.offset + SOLVER_TOLERANCE:
            continue
        above, below = best + 1e-6 * (1 + abs(best)), best - 0.5 * (best - form.offset)
        counted = counted_form(form, above)
        if counted is not None:
            assert find_minimum(counted.form) == pytest.approx(best, abs=SOLVER_TOLERANCE), seed
            cut += 1
        tight = counted_form(form, below)
        if tight is not None:
            assert find_minimum(tight.form, objective_cutoff=below) is None, seed
    assert compared > part.divide(60)
    assert cut > part.divide(20)


@parametrize_parts(2)
def test_points_keep_value_and_rows(part):
    """Extended points, whatever they are best for."""
    extended = 0
    for seed, form in part.select(limited_forms(40, (8, 14))):
        counted = counted_form(form, None)
        if counted is None:
            continue
        rng = np.random.default_rng(len(seed))
        priced = replace(form, objective=rng.random(form.n_columns))
        raw = backend("highs").solve(priced, Limits(rel_gap=0.0))
        if raw.x is None:
            continue
        point = counted.extend_point(raw.x)
        assert counted.form.max_violation(point) <= SOLVER_TOLERANCE, seed
        assert counted.form.objective_value(point) == pytest.approx(form.objective_value(raw.x)), (
            seed
        )
        extended += 1
    assert extended > part.divide(20)


@pytest.mark.parametrize(
    "begin", [0, *(pytest.param(n, marks=pytest.mark.seeds) for n in (10, 20, 30))]
)
def test_the_driver_ends_with_the_value_of_compact(begin, monkeypatch):
    """Most of the forms that it solves are counted."""
    counted = []

    def watched(form, cutoff, **given):
        found = count_equal_columns(form, cutoff, **given)
        counted.append(found is not None)
        return found

    monkeypatch.setattr(symmetry, "count_equal_columns", watched)
    for number in range(begin, begin + 10):
        what = find_fault(
            alike_problem(f"counted {number}", (9, 16)), "lazy", reference=solve_by_compact
        )
        assert not what, number
    assert sum(counted) > len(counted) / 2


def test_without_a_limit_relaxations_are_not_counted():
    """Only a limit makes equal decisions worth counting."""
    counted = 0
    for number in range(10):
        problem = alike_problem(f"counted {number}", (9, 16))
        grouping = random_rows(make_rng(number), problem)
        free = problem.without_limits(Quantity.TIME)
        counted += counted_form(make_relaxation(problem, grouping).form, None) is not None
        assert counted_form(make_relaxation(free, grouping).form, None) is None
    assert counted > 4
