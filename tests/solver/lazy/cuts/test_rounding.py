"""Rounded memory rows: right-hand sides that are sums of tensors, and no point that they lose."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.instances import scarce_problem, seeded
from kit.relaxation import CLOSE, random_rows, relaxation_of, solved
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.model.aggregated import Grouping
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.solver.lazy.cuts.rounding import RoundingSeparator, largest_sum

if TYPE_CHECKING:
    from poetmodel.solver.lazy.cuts import Cut
    from poetmodel.solver.lazy.relaxation import Relaxation

MOST_SUMS = 1 << 20


def largest_by_trial(sizes: list[int], limit: int) -> int:
    """Return the largest sum up to a limit among all choices."""
    sums = [sum(some) for r in range(len(sizes) + 1) for some in combinations(sizes, r)]
    return max(total for total in sums if total <= limit)


def test_the_largest_sum_is_that_of_all_choices() -> None:
    """With sizes that repeat, have a divisor, or are above the limit."""
    rng = seeded("sums")
    reached = 0
    for _ in range(300):
        factor, most = rng.choice((1, 3, 64)), rng.choice((2, 5, 30))
        sizes = [factor * rng.randint(1, most) for _ in range(rng.randint(1, 9))]
        limit = rng.randint(0, sum(sizes) + 2)
        found = largest_sum(sizes, limit, MOST_SUMS)
        assert found == largest_by_trial(sizes, limit), (sizes, limit)
        reached += found == limit
    assert 50 < reached < 250


def test_many_copies_of_a_size_are_counted_one_by_one() -> None:
    """Every number of them is a sum, however many there are."""
    for count in range(1, 40):
        for limit in range(7 * count + 8):
            assert largest_sum([7] * count, limit, MOST_SUMS) == min(limit // 7, count) * 7
            assert largest_sum([7] * count + [5], limit, MOST_SUMS) == largest_by_counting(
                count, limit
            )


def largest_by_counting(sevens: int, limit: int) -> int:
    """Return the largest sum of some sevens and at most one five."""
    sums = [7 * a + 5 * b for a in range(sevens + 1) for b in (0, 1)]
    return max(total for total in sums if total <= limit)


def test_above_too_many_sums_the_divisor_counts() -> None:
    """Then the right-hand side may be too large, never too small."""
    assert largest_sum([6, 9], 40, 10) == 39
    assert largest_sum([6, 9], 32, 10) == 15


def test_rows_of_a_graph_by_hand() -> None:
    """Four tensors of 10 B and one of 1 B before a node of 1 B, in 26 B: two large ones fit."""
    names = ["a", "b", "c", "d"]
    nodes = [operation(name, output_bytes=10) for name in names]
    nodes += [
        operation("small", output_bytes=1),
        operation("full", output_bytes=1),
        operation("end", output_bytes=1, inputs=(*names[:2], "small")),
        operation("last", output_bytes=1, inputs=(*names[2:], "end")),
    ]
    graph = Graph(name="sizes", nodes=tuple(nodes))
    ones = [1.0] * len(nodes)
    costs = Costs.from_arrays(graph, compute_time_s=ones, compute_energy_j=ones)
    relaxation = relaxation_of(Problem(graph, costs, ram=26), Grouping(8, frozenset({5})))
    rows = {
        tuple(sorted((-value for value in cut.values), reverse=True)): -cut.lower
        for cut in RoundingSeparator(relaxation, MOST_SUMS).rows()
    }
    assert rows == {(1.0, 1.0, 1.0, 1.0): 2.0, (1.0, 1.0, 1.0, 1.0, 0.1): 2.1}
    x = np.full(relaxation.form.n_columns, 0.6)
    separator = RoundingSeparator(relaxation, MOST_SUMS)
    assert separator.separate(x, 0.45) == []
    assert len(separator.separate(x, 0.35)) == 2
    looks = iter([False, True])  # the time is over after the first row
    assert len(RoundingSeparator(relaxation, MOST_SUMS, lambda: next(looks)).rows()) == 1


def test_with_the_peak_minimized_there_are_none() -> None:
    """The budget of a row is a column then."""
    problem = scarce_problem("rounded/ram", 8, minimize="ram")
    relaxation = relaxation_of(problem, Grouping(8, frozenset(range(8))))
    assert RoundingSeparator(relaxation, MOST_SUMS).rows() == []


def random_relaxations(count: int, n: tuple[int, int]) -> list[tuple[str, Relaxation, list[Cut]]]:
    """Return random relaxations that have rounded rows."""
    found = []
    for number in range(count):
        seed = f"rounded/{number}"
        problem = scarce_problem(seed, n)
        if problem.minimize == Quantity.RAM or obstacle(problem) is not None:
            continue
        relaxation = relaxation_of(problem, random_rows(seeded(f"rows of {seed}"), problem, 0.5))
        rows = RoundingSeparator(relaxation, MOST_SUMS).rows()
        if rows:
            found.append((seed, relaxation, rows))
    return found


def check_optima(count: int, n: tuple[int, int]) -> tuple[int, int]:
    """Compare optima with and without rounded rows; return how many, and linear ones raised."""
    compared = raised = 0
    for seed, relaxation, rows in random_relaxations(count, n):
        whole, linear = solved(relaxation), relaxation.form.relaxed()
        tightened = relaxation.with_cuts(rows)
        again = backend("highs").solve(tightened, Limits(rel_gap=0.0))
        assert whole.infeasible == again.infeasible, seed
        if whole.objective is None:
            continue
        assert again.objective == pytest.approx(whole.objective, abs=CLOSE), seed
        below = backend("highs").solve(linear, Limits()).objective
        above = backend("highs").solve(tightened.relaxed(), Limits()).objective
        assert below is not None
        assert above is not None
        assert below - CLOSE <= above <= whole.objective + CLOSE, seed
        compared += 1
        raised += above > below + CLOSE
    return compared, raised


def test_optima_stay_and_linear_bounds_rise() -> None:
    """On random relaxations with several outputs, workspaces and all limits."""
    compared, raised = check_optima(30, (6, 10))
    assert compared > 8
    assert raised > 0  # most of what a limit rules out is stated as such already


@pytest.mark.seeds
def test_more_optima_stay() -> None:
    """The same on 1,500 instances."""
    compared, raised = check_optima(1500, (5, 13))
    assert compared > 300
    assert raised > 20
