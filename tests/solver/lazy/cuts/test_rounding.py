"""Rounded memory rows: right-hand sides that are sums of tensors, and no point that they lose."""

from itertools import combinations

import numpy as np
import pytest

from kit.instances import scarce_problem, seeded
from kit.relaxation import CLOSE, least, random_rows, relaxation_of
from kit.rotation import parts
from kit.worked import unit_problem, written
from poetmodel.model.aggregated import Grouping
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.solver.lazy.cuts.rounding import RoundingSeparator, largest_sum

MOST_SUMS = 1 << 20


def largest_by_trial(sizes, limit):
    """Return the largest sum up to a limit among all choices."""
    sums = [sum(some) for r in range(len(sizes) + 1) for some in combinations(sizes, r)]
    return max(total for total in sums if total <= limit)


def test_the_largest_sum_is_that_of_all_choices():
    """With sizes that repeat, many times or not, have a divisor, or are above the limit.

    Above too many sums the divisor counts: the sum may be too large then, never too small.
    """
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
    for count in range(1, 40):
        sums = [7 * a + 5 * b for a in range(count + 1) for b in (0, 1)]
        for limit in range(7 * count + 8):
            found = largest_sum([7] * count + [5], limit, MOST_SUMS)
            assert found == max(total for total in sums if total <= limit)
            assert largest_sum([7] * count, limit, MOST_SUMS) == min(limit // 7, count) * 7
    assert largest_sum([6, 9], 40, 10) == 39
    assert largest_sum([6, 9], 32, 10) == 15


def test_rows_of_a_graph_by_hand():
    """Four tensors of 10 B and one of 1 B before a node of 1 B, in 26 B: two large ones fit.

    With the peak minimized the budget of a row is a column, and there are none.
    """
    large = [f"{name} 10" for name in "abcd"]
    graph = written(*large, "small 1", "full 1", "end 1 a b small", "last 1 c d end")
    relaxation = relaxation_of(unit_problem(graph, ram=26), Grouping(8, frozenset({5})))
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
    problem = scarce_problem("rounded/ram", 8, minimize="ram")
    relaxation = relaxation_of(problem, Grouping(8, frozenset(range(8))))
    assert RoundingSeparator(relaxation, MOST_SUMS).rows() == []


@parts(30)
def test_optima_stay_and_linear_bounds_rise(part):
    """On random relaxations with several outputs, workspaces and all limits.

    Few bounds rise: most of what a limit rules out is stated as such already.
    """
    compared = raised = 0
    for number in part.of(range(1500)):
        seed = f"rounded/{number}"
        problem = scarce_problem(seed, (5, 13))
        if problem.minimize == Quantity.RAM or obstacle(problem) is not None:
            continue
        relaxation = relaxation_of(problem, random_rows(seeded(f"rows of {seed}"), problem, 0.5))
        rows = RoundingSeparator(relaxation, MOST_SUMS).rows()
        if not rows:
            continue
        whole, tightened = least(relaxation.form), relaxation.with_cuts(rows)
        again = least(tightened)
        assert (whole is None) == (again is None), seed
        if whole is None:
            continue
        assert again == pytest.approx(whole, abs=CLOSE), seed
        below, above = least(relaxation.form.relaxed()), least(tightened.relaxed())
        assert below - CLOSE <= above <= whole + CLOSE, seed
        compared += 1
        raised += above > below + CLOSE
    assert compared > part.share(150)
    assert raised > 0 or part.number > 0
