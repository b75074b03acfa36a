"""Cover cuts: they exclude points within a solver's tolerance only, and no valid point."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kit.claims import answer, find_fault, find_wrong_end, is_refusal, may_be_refused
from kit.instances import make_rng, random_costs, random_graph, random_instance
from kit.oracle import optimum
from kit.rotation import parametrize_parts
from kit.worked import even_costs, skip_problem
from poetmodel.backends.compiler import compile_model
from poetmodel.backends.layout import to_standard_form
from poetmodel.backends.standard_form import StandardForm
from poetmodel.device import Costs
from poetmodel.errors import ModelError
from poetmodel.graph import Graph, floor
from poetmodel.model import build
from poetmodel.model.arrays import Model
from poetmodel.model.compact import COMPACT
from poetmodel.model.linear import scale_and_register_limit
from poetmodel.problem import LIMITED_SUMS, LinearRow, Problem
from poetmodel.schedule import simulate
from poetmodel.solver import monolithic
from poetmodel.solver.covers import add_covers, limit_rows


def knapsack(sizes, limit, **more):
    """Return one row over binaries."""
    return StandardForm.from_arrays(
        [sizes], np.zeros(len(sizes)), upper=1.0, integer=True, row_upper=[limit], **more
    )


@pytest.mark.parametrize(
    ("sizes", "limit", "x", "rows"),
    [
        ([3, 2, 2], 5, [1.0, 1, 0], [0]),
        # Rounding errors of a sum that meets the limit exactly do not count: 0.3 + 0.2 + 0.1.
        ([0.1, 0.2, 0.3], 0.6, [1.0, 1, 1], [0]),
        # Only the named rows may be looked at.
        ([3, 3], 4, [1.0, 1], []),
    ],
)
def test_a_point_within_its_rows_needs_no_cut(sizes, limit, x, rows):
    """It has no violated limit."""
    assert add_covers(knapsack(sizes, limit), np.array(x), rows) is None


def test_a_cover_is_excluded_and_no_larger_than_needed():
    """Of 3 + 2 + 1 > 4 the first two are enough: not both of them.

    In ``3 x + 3 y - 4 peak <= 0`` with ``peak <= 1``, x and y cannot both be 1.
    """
    form = add_covers(knapsack([1, 3, 2], 4), np.ones(3), [0])
    assert form.matrix.toarray()[1].tolist() == [0.0, 1.0, 1.0]
    assert (form.row_upper[1], form.row_name(1), form.n_rows) == (1.0, "cover", 2)
    form = StandardForm.from_arrays(
        [[3, 3, -4]], np.zeros(3), upper=1.0, integer=[True, True, False], row_upper=[0]
    )
    found = add_covers(form, np.array([1.0, 1.0, 1.0]), [0])
    assert found.matrix.toarray()[1].tolist() == [1.0, 1.0, 0.0]


def heavy(rng, **fixed):
    """Return a problem that lacks one byte for a better schedule.

    Its tensors have 100 MB to 900 MB and up to 9 bytes more. For a solver with a tolerance of
    1e-7 of a row's largest coefficient, single bytes are negligible.
    """
    small = random_instance(rng, (4, 5), **fixed)
    nodes = tuple(
        replace(
            node,
            outputs=tuple(
                replace(tensor, bytes=tensor.bytes * 10**8 + rng.randint(0, 9))
                for tensor in node.outputs
            ),
            workspace_bytes=node.workspace_bytes * 10**8,
        )
        for node in small.graph.nodes
    )
    graph = Graph(name="heavy", nodes=nodes)
    least = max(floor(graph).bytes, 1)
    limits = {"ram": max(least, small.ram_budget_bytes * 10**8 + 60)}
    if small.aux_limit_bytes is not None:
        limits["aux_bytes"] = small.aux_limit_bytes * 10**8 + 60
    problem = replace(small, graph=graph, **limits)
    best = optimum(problem)
    if best is None:
        return problem
    used = simulate(graph, small.costs, best.schedule)
    limits["ram"] = max(least, used.peak_ram_bytes - 1)
    if "aux_bytes" in limits:
        limits["aux_bytes"] = max(0, used.aux_used_bytes - 1)
    return replace(problem, **limits)


BELOW_TOLERANCE = 31
"""A heavy problem of which HiGHS answers first with what is a byte too much."""


@pytest.mark.parametrize("way", ["built", "unreduced"])
@parametrize_parts(4)
def test_bytes_below_a_solver_s_tolerance_count(part, way, monkeypatch):
    """The optimum is exact to the byte, where the solver's first answer often is not."""
    used = 0

    def counted(*arguments, **choices):
        nonlocal used
        used += 1
        return add_covers(*arguments, **choices)

    monkeypatch.setattr(monolithic, "add_covers", counted)
    for seed in {BELOW_TOLERANCE, *part.select(range(90))}:
        minimize = ("energy", "time", "writes")[seed % 3]
        problem = heavy(make_rng(f"heavy/{seed}"), minimize=minimize, zero_bytes=False)
        assert not find_fault(problem, way, watched=False), seed
    assert used > 0, "no answer was beyond the tolerance; this shows nothing"


@pytest.mark.parametrize("way", ["built", "unreduced"])
@parametrize_parts(3)
def test_the_least_ram_is_bounded_to_the_byte(part, way):
    """If a solver is wrong by a few bytes, no bound is above the optimum."""
    for seed in part.select(range(50)):
        problem = heavy(make_rng(f"heavy/{seed}"), minimize="ram")
        best, result = optimum(problem), answer(problem, way, gap=0.0)
        assert not find_wrong_end(problem, best, result, 0.0, proved=False), seed
        if best is not None:
            assert result.value <= best.value * (1 + 1e-7), seed
            assert (result.status == "optimal") == (result.value == best.value), seed


@pytest.mark.parametrize("reductions", [True, False])
def test_covers_look_at_every_limit(reductions):
    """All rows that state a verified limit, and no others."""
    seen = set()
    for counts in ("serial", "overlap"):
        problem = skip_problem(deadline=12, deadline_counts=counts, energy_budget=12, aux_bytes=9)
        problem = replace(problem, costs=even_costs(problem.graph, page_in=(5.0, 1.0)))
        problem = problem.subject_to(few=lambda v: v.page_ins["a"] <= v.recomputations["a"])
        form = compile_model(build(problem, reductions=reductions))
        seen |= {form.rows[r].family for r in limit_rows(form)}
    sums = LIMITED_SUMS - {"stated_deadline"}
    assert seen == {"memory", "storage", *sums}


def signed_form(values, limit):
    """Return a model with one limit over binaries, stated as formulations do."""
    m = Model(skip_problem(), COMPACT, exact=True)
    columns = list(m.add_variables("x", range(len(values))).values())
    m.costs = [(1.0, column) for column in columns]
    exact = LinearRow.from_terms(zip(values, columns, strict=True), upper=limit, name="few")
    row = scale_and_register_limit(m, exact)
    m.begin_rows("few")
    m.add_linear_row(LinearRow.from_terms([(1, columns[0])], lower=0) if row is None else row)
    m.begin_rows("anchor")
    m.add_row(None, columns, [1.0] * len(columns), lower=0.0)
    return to_standard_form(m)


@pytest.mark.parametrize("whole", [True, False])
@parametrize_parts(2)
def test_no_point_that_keeps_a_signed_row_is_lost(part, whole):
    """The row and its covers admit each 0/1 point within the limit; covers exclude the others."""
    excluded = 0
    for seed in part.select(range(40)):
        rng = np.random.default_rng(seed)
        values = [int(value) for value in rng.integers(-9, 10, size=6) if value]
        positive = sum(value for value in values if value > 0)
        if positive < 2:
            continue
        limit = int(rng.integers(sum(values) - positive, positive))
        scale = 1 if whole else 0.1
        form = signed_form([scale * value for value in values], scale * limit)
        points = [np.array(bits) for bits in product((0.0, 1.0), repeat=len(values))]
        kept = [x for x in points if sum(values * x) <= limit]
        assert all(form.max_violation(x) == 0.0 for x in kept)
        for x in points:
            found = add_covers(form, x, limit_rows(form))
            assert (found is None) == (sum(values * x) <= limit), (values, limit, x)
            if found is not None:
                excluded += 1
                assert found.max_violation(x) >= 1.0
                assert all(found.max_violation(y) == 0.0 for y in kept)
    assert excluded > part.divide(100)


def test_whole_numbers_of_any_size_are_exact():
    """One unit too many is detected, for any numbers; not for counts."""
    large = 10**30
    form = signed_form([large + 1, large, -large], large)
    assert add_covers(form, np.array([0.0, 1.0, 0.0]), limit_rows(form)) is None
    assert add_covers(form, np.array([1.0, 1.0, 1.0]), limit_rows(form)) is not None
    form = signed_form([2, -1, 1], 1)
    x = np.array([1.0, 0.0, 1.0])
    assert add_covers(form, x, limit_rows(form)) is not None
    counts = replace(form, upper=np.array([2.0, 1.0, 1.0]))
    assert add_covers(counts, x, limit_rows(counts)) is None


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12, 1e6])
@parametrize_parts(3)
def test_limits_that_are_just_kept(part, scale):
    """With a limit that is exactly the least time or energy, the least is found: any real costs.

    Where `build` refuses a cost beside the single pass, `solve` still finds it.
    """
    for seed in part.select(range(25)):
        problem = tight(make_rng(f"tight/{seed}"), scale)
        best = pytest.approx(optimum(problem).value, rel=2e-9)
        assert answer(problem, "compact", gap=0.0).value == best, seed
        try:
            assert answer(problem, "built", gap=0.0).value == best, seed
        except ModelError as error:
            if not is_refusal(error, "built"):
                raise
            assert may_be_refused(problem), seed


def tight(rng, scale):
    """Make a problem with real costs whose deadline or energy budget is the least possible one."""
    while True:
        graph = random_graph(rng, (3, 5))
        device = random_costs(rng, graph).device

        def draw(most):
            return 0.0 if rng.random() < 0.1 else rng.random() * most

        costs = Costs.from_arrays(
            graph,
            compute_time_s=[draw(3 * scale) for _ in graph.nodes],
            compute_energy_j=[draw(3 * scale) for _ in graph.nodes],
            page_in=[(draw(2), draw(2)) for _ in graph.tensors],
            page_out=[(draw(2), draw(2)) for _ in graph.tensors],
            device=device,
        )
        limits = {
            "ram": max(1, floor(graph).bytes + rng.randint(0, 4)),
            "deadline_counts": rng.choice(("serial", "compute")),
        }
        quantity, limit = rng.choice((("time", "deadline"), ("energy", "energy_budget")))
        least = optimum(Problem(graph, costs, minimize=quantity, **limits))
        if least is not None and least.value > 0:
            minimize = rng.choice(("energy", "time", "ram", "writes"))
            return Problem(graph, costs, **limits, **{limit: least.value}, minimize=minimize)
