"""Problems with extreme numbers and contradictions, against exhaustive search.

One byte in 2**53, coefficients that differ by factors of 1e9, costs from 1e-300 to 1e300, limits
below a solver's tolerances, rows that barely contradict each other, empty rows, rows of impossible
decisions.
"""

from dataclasses import replace
from functools import partial

import pyomo.environ as pyo
import pytest

from kit import claims
from kit.claims import BACKENDS, answer
from kit.instances import make_rng, scaled_instance
from kit.own_rows import scaled_rows_problem
from kit.rotation import mark_seeds_except
from kit.worked import costs_of
from poetmodel.errors import InputError
from poetmodel.graph import Graph, operation
from poetmodel.model import build
from poetmodel.model.linear import scale_limit
from poetmodel.problem import USER_OBJECTIVE, Constraint, LinearRow, Problem
from poetmodel.result import Status
from poetmodel.solver import solve

BOTH = ("lazy", "compact")
ROWS_EACH_WAY = (
    "lazy",
    pytest.param("compact", marks=pytest.mark.slow),
    pytest.param("unreduced", marks=pytest.mark.seeds),
)
fault = partial(claims.find_fault, watched=False)
faults = partial(claims.find_faults, watched=False)
EACH_WAY = (*BOTH, pytest.param("unreduced", marks=pytest.mark.slow))

# -- own rows ------------------------------------------------------------------------------------
BIG = 2**52


def chain(*sizes, ram="100%", **changes):
    """Return a problem of nodes ``a``, ``b``, ...; each reads the one before, the last all."""
    names = "abcdefgh"[: len(sizes)]
    nodes = []
    for k, (name, size) in enumerate(zip(names, sizes, strict=True)):
        last = k == len(sizes) - 1
        inputs = tuple(names[:k]) if last else tuple(names[max(0, k - 1) : k])
        nodes.append(operation(name, output_bytes=size, inputs=inputs, recomputable=name != "d"))
    graph = Graph(name="chain", nodes=tuple(nodes))
    n = len(sizes)
    costs = costs_of(
        graph,
        [1.0 + k for k in range(n)],
        [3.0 + 2 * k for k in range(n)],
        [(0.5, 2.0)] * n,
        [(0.25, 4.0)] * n,
    )
    return Problem(graph, costs, ram=ram, deadline_counts="serial", **changes)


ROOMY = chain(8, 4, 2, 1)
"""Everything fits; ``d`` is the last, and cannot be computed again."""
TIGHT = chain(5, 4, 3, 2, 1, ram=13)
"""Something must go; ``d`` cannot be computed again."""
HUGE = chain(BIG, BIG - 9, 7, ram=2 * BIG)
BILLION = chain(10**9 + 1, 10**9, 1, 7, ram=2 * 10**9 + 9)

Row = tuple[dict[str, float], float | None, float | None]
"""Coefficients, least value, largest value."""
ROWS = {
    "nothing is at most 1": (TIGHT, [({}, None, 1)]),
    "nothing is at most 0": (TIGHT, [({}, 0, 0)]),
    "nothing is at least 1": (TIGHT, [({}, 1, None)]),
    "nothing is at most -1": (TIGHT, [({}, None, -1)]),
    "nothing of bytes is at least 1": (TIGHT, [({"bytes_written": 0}, 1, None)]),
    "nothing of bytes is at most 1": (TIGHT, [({"bytes_written": 0, "energy_j": 0}, None, 1)]),
    "the last node again": (ROOMY, [({"recomputations:d": 1}, 1, None)]),
    "once only, less than nothing": (TIGHT, [({"recomputations:d": -1}, None, -0.5)]),
    "as often as there are stages": (ROOMY, [({"recomputations:a": 1}, 3, 3)]),
    "once more than there are stages": (ROOMY, [({"recomputations:a": 1}, 4, None)]),
    "in too often": (ROOMY, [({"page_ins:a": 1}, 4, None)]),
    "out twice in bytes": (ROOMY, [({"bytes_written": 1}, 16, None)]),
    "in without going out": (TIGHT, [({"page_ins:b": 1}, 1, None), ({"page_outs:b": 1}, None, 0)]),
    "a half is none": (TIGHT, [({"recomputations:a": 2, "page_ins:a": 2}, None, 1)]),
    "a half is one": (TIGHT, [({"recomputations:c": 2}, 1, None)]),
    "between a half and three quarters": (TIGHT, [({"page_outs:a": 1}, 0.5, 0.75)]),
    "odd sum of even numbers": (TIGHT, [({"page_ins:a": 2, "recomputations:a": 4}, 3, 3)]),
    "odd sum of even numbers, at least and at most": (
        TIGHT, [({"page_ins:a": 2, "page_ins:b": 4}, *limits) for limits in ((3, None), (None, 3))]
    ),
    "seven of threes and fives": (TIGHT, [({"page_ins:a": 3, "page_ins:b": 5}, 7, 7)]),
    "eight of threes and fives": (TIGHT, [({"page_ins:a": 3, "page_ins:b": 5}, 8, 8)]),
    "tenths": (TIGHT, [({"page_ins:a": 0.1, "page_ins:b": 0.2}, 0.3, 0.3)]),
    "tenths, summed otherwise": (TIGHT, [({"page_ins:a": 0.1, "recomputations:a": 0.1}, 0.3, 0.3)]),
    "energy of nothing between": (TIGHT, [({"energy_j": 1}, 55.25, 55.75)]),
    "a hair between": (
        TIGHT, [({"compute_s": 1}, None, 16), ({"compute_s": 1}, 16 * (1 + 1e-6), None)]
    ),
    "one byte of a billion too many": (BILLION, [({"bytes_written": 1}, None, 10**9)]),
    "a billion bytes are enough": (BILLION, [({"bytes_written": 1}, 10**9, 10**9)]),
    "a billion and one": (BILLION, [({"bytes_written": 1}, 10**9 + 1, 10**9 + 1)]),
    "a billion and two": (BILLION, [({"bytes_written": 1}, 10**9 + 2, 10**9 + 2)]),
    "both but for a byte": (BILLION, [({"bytes_written": 1}, 2 * 10**9, 2 * 10**9)]),
    "more out than in, by a byte": (
        BILLION, [({"bytes_written": 1, "bytes_read": -1}, 1, 1)]
    ),
    "2**52 bytes": (HUGE, [({"bytes_written": 1}, BIG, BIG)]),
    "2**52 bytes less nine": (HUGE, [({"bytes_written": 1}, BIG - 9, BIG - 9)]),
    "2**52 bytes less one": (HUGE, [({"bytes_written": 1}, BIG - 1, BIG - 1)]),
    "2**53 bytes less nine": (HUGE, [({"bytes_written": 1}, 2 * BIG - 9, 2 * BIG - 9)]),
    "2**53 bytes less eight": (HUGE, [({"bytes_written": 1}, 2 * BIG - 8, 2 * BIG - 8)]),
    "more than 2**53 bytes": (HUGE, [({"bytes_read": 1}, 3 * BIG - 9, 3 * BIG - 9)]),
    "more than 2**53 bytes and one": (HUGE, [({"bytes_read": 1}, 3 * BIG - 8, 3 * BIG - 8)]),
    "one byte more than goes out comes in": (
        HUGE, [({"bytes_read": 1, "bytes_written": -1}, 1, None)]
    ),
    "out but for a byte": (HUGE, [({"bytes_written": 1, "bytes_read": -1}, 1, BIG - 2)]),
    "a thousand million of one beside another": (
        TIGHT, [({"page_outs:a": 10**9, "recomputations:b": 1}, 10**9, 10**9)]
    ),
    "a thousand million of one less another": (
        TIGHT, [({"page_outs:a": 10**9, "page_outs:b": -(10**9), "recomputations:c": 1}, 1, 1)]
    ),
    "a thousand million, at least one more": (
        TIGHT, [({"page_outs:a": 10**9, "page_ins:b": 1}, 10**9 + 1, None)]
    ),
    "2**50 of one beside another": (
        TIGHT,
        [
            ({"page_outs:a": 2**50, "recomputations:a": -1}, None, 2**50 - 2),
            ({"page_outs:a": 1}, 1, None),
        ],
    ),
    "hardly anything is too much": (
        TIGHT, [({"page_ins:a": 1e-12, "page_ins:b": 1e-12}, None, 5e-13)]
    ),
    "hardly anything is wanted": (TIGHT, [({"page_ins:c": 1e-12}, 1e-12, None)]),
    "very much is allowed": (TIGHT, [({"page_ins:a": 1e15}, 2e15, 2e15)]),
    "very much is a little too much": (TIGHT, [({"page_ins:a": 1e15}, 1.5e15, 1.75e15)]),
    "one, or very many": (TIGHT, [({"page_ins:a": 2**40, "page_outs:d": 1}, 1, 1)]),
    "two, or very much": (
        ROOMY, [({"recomputations:a": 1.0, "page_ins:a": 1e20, "page_outs:b": 7e19}, 2.0, 2.0)]
    ),
    "two, or more than that": (
        ROOMY, [({"recomputations:a": 1.0, "page_ins:a": 1e20, "page_outs:b": 7e19}, 2.0, None)]
    ),
    "far below": (TIGHT, [({"page_ins:a": 1}, -1e18, 1e18)]),
}  # fmt: skip
"""Rows by what they say."""

OBJECTIVES = {
    "nothing": (TIGHT, {"constant": 3}),
    "nothing of bytes": (TIGHT, {"bytes_written": 0}),
    "a large constant": (TIGHT, {"energy_j": 1, "constant": 1e9}),
    "a negative constant": (TIGHT, {"energy_j": 1, "constant": -1e3}),
    "most energy": (ROOMY, {"energy_j": -1}),
    "most time": (ROOMY, {"compute_s": -1, "transfer_s": -1}),
    "most bytes": (TIGHT, {"bytes_written": -1, "bytes_read": -1}),
    "most recomputations": (ROOMY, {f"recomputations:{k}": -1 for k in "abcd"}),
    "out for little": (TIGHT, {**{f"page_outs:{k}": -5 for k in "abcde"}, "energy_j": 1}),
    "what cannot be": (TIGHT, {"recomputations:e": -100, "page_ins:e": -7, "energy_j": 1}),
    "wear and energy": (TIGHT, {"energy_j": 1, "bytes_written": 0.5}),
    "one of a billion": (BILLION, {"bytes_written": 1, "recomputations:a": 1}),
    "huge bytes, wanted": (HUGE, {"bytes_written": -1, "bytes_read": 1}),
}  # fmt: skip
"""Objectives by what they say."""


def with_rows(problem, rows):
    """Return a problem with rows."""
    stated = tuple(
        Constraint(name=f"row{place}", terms=terms, lower=lower, upper=upper)
        for place, (terms, lower, upper) in enumerate(rows)
    )
    return replace(problem, constraints=stated)


@pytest.mark.parametrize("what", ROWS)
@pytest.mark.parametrize("way", ROWS_EACH_WAY)
def test_rows_at_the_edge(way, what):
    """Each is kept, or shown to be impossible."""
    assert not fault(with_rows(*ROWS[what]), way)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS[1:])
@pytest.mark.parametrize("way", BOTH)
def test_rows_at_the_edge_by_other_solvers(way, name):
    """The same rows."""
    assert not faults(ROWS, lambda what: with_rows(*ROWS[what]), way, backend=name)


@pytest.mark.parametrize("what", OBJECTIVES)
@pytest.mark.parametrize("way", ROWS_EACH_WAY)
def test_objectives_at_the_edge(way, what):
    """Each is as small as it can be."""
    problem, terms = OBJECTIVES[what]
    assert not fault(
        replace(problem, minimize=USER_OBJECTIVE, user_objective=tuple(terms.items())), way
    )


@pytest.mark.parametrize("changes", [{"paging": False}, {"recompute": False}, {"aux_bytes": 0}])
@pytest.mark.parametrize("way", ROWS_EACH_WAY)
def test_what_a_problem_forbids_cannot_be_wanted(way, changes):
    """Rows require decisions that paging, recomputation and RAM forbid, one by one."""
    for count in ("recomputations", "page_ins", "page_outs"):
        for name in "abcd":
            for limits in ((1, None), (None, 0), (2, 2)):
                row = ({f"{count}:{name}": 1}, *limits)
                assert not fault(with_rows(replace(ROOMY, **changes), [row]), way), row


# -- at every scale ------------------------------------------------------------------------------
BYTES_BESIDE_TERABYTES = [(scaled_rows_problem, "scaled rows/161", way, "highs") for way in BOTH]
"""A byte that no solver sees, beside terabytes, of a tensor that no other row names."""


@pytest.mark.parametrize(
    ("make", "seed", "way", "solver"),
    [
        *mark_seeds_except(
            BYTES_BESIDE_TERABYTES, BYTES_BESIDE_TERABYTES[:1], BYTES_BESIDE_TERABYTES
        ),
        # SCIP finds the solution that ends this one before its search begins.
        *((scaled_instance, "scales/927", "lazy", name) for name in BACKENDS),
    ],
)
def test_single_problems_at_scale(make, seed, way, solver):
    """Problems on which a solver was wrong."""
    assert not fault(make(make_rng(seed)), way, backend=solver, gap=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("reductions", [True, False])
@pytest.mark.parametrize(("minimize", "least"), [("writes", 4000000007), ("ram", 12000000008)])
def test_models_with_own_rows_are_proved_to_the_byte(minimize, least, reductions, name):
    """Without any gap, and beside a row that no other problem has: the cheaper page-out is out."""
    sizes = (4000000007, 4000000001, 8000000007)
    problem = transfers(1, 1, sizes=sizes, ram=12000000014, minimize=minimize)
    model = build(problem, reductions=reductions)
    paged_out = [model.M_out[t, 1] for t in range(4) if (t, 1) in model.M_out]
    model.b_stays = pyo.Constraint(expr=sum(paged_out) == 0)
    before = set(model.component_map())
    result = solve(model, backend=name, gap=0.0)
    assert (result.status, result.value) == (Status.OPTIMAL, least)
    assert result.objective_bound == least
    assert set(model.component_map()) == before


def transfers(time_s, energy_j, *, sizes=(4, 4, 8), ram=12, **limits):
    """Return a problem in which one of two transfers that would do has these costs."""
    a_bytes, b_bytes, c_bytes = sizes
    graph = Graph(
        name="transfers",
        nodes=(
            operation("a", output_bytes=a_bytes, recomputable=False),
            operation("b", output_bytes=b_bytes, recomputable=False),
            operation("c", output_bytes=c_bytes, recomputable=False),
            operation("d", output_bytes=1, inputs=("a", "b")),
        ),
    )
    costs = costs_of(
        graph, [1] * 4, page_ins=[(time_s, energy_j), *[(1, 1)] * 3], page_outs=[(1, 1)] * 4
    )
    return Problem(graph, costs, ram=ram, **limits)


@pytest.mark.parametrize("minimize", ["energy", "time", "writes"])
@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("cost", [1e-300, 1e-30, 1e15, 1e30, 1e300])
def test_one_cost_beyond_all_others(cost, way, minimize):
    """A very cheap or very expensive transfer is decided exactly."""
    for limits in ({}, {"deadline": 8.0}, {"energy_budget": 8.0}):
        problem = transfers(cost, cost, minimize=minimize, **limits)
        assert not fault(problem, way), limits


@pytest.mark.parametrize("scale", [1e-300, 1e-290, 1e290])
@pytest.mark.parametrize("way", EACH_WAY)
def test_all_costs_next_to_nothing_or_enormous(scale, way):
    """Costs of a device of 1e30 FLOP/s and more: only their ratios count."""
    plain = transfers(1, 1)
    table = plain.table
    costs = costs_of(
        plain.graph,
        [scale * value for value in table.compute_time_s],
        [scale * value for value in table.compute_energy_j],
        [(1, scale), (1, 2 * scale), *[(1, scale)] * 2],
        [(1, scale)] * 4,
    )
    problem = Problem(plain.graph, costs, ram=12)
    assert not fault(problem, way)
    assert answer(problem, way, gap=0.0).overhead_j == pytest.approx(2 * scale)


def test_costs_beyond_numbers_are_refused():
    """Before any solve, with the node or tensor and the field."""
    with pytest.raises(InputError, match="a: page_in_time_s"):
        transfers(1e308, 1)
    with pytest.raises(InputError, match="a: page_in_energy_j"):
        transfers(1, 1e-305)


@pytest.mark.parametrize("way", BOTH)
def test_bytes_are_decided_where_rows_cannot_tell(way):
    """The least peak of 2**50 B, and the least writes, to the byte and with a gap of 0."""
    size = 2**50
    sizes = (size, size + 1, 2 * size + 3)
    for ram, minimize, least in (
        ("100%", "ram", 2 * size + 3), (3 * size + 3, "writes", size + 1)
    ):  # fmt: skip
        problem = transfers(1, 1, sizes=sizes, ram=ram, minimize=minimize)
        result = answer(problem, way, gap=0.0)
        assert (result.status, result.value) == (Status.OPTIMAL, least)


def test_no_point_that_keeps_a_limit_is_near_its_row():
    """Rows of random limits, bytes and reals: valid points have a slack of five tolerances."""
    for number in range(300):
        rng = make_rng(f"rows/{number}")
        whole = rng.random() < 0.5
        values = [10 ** rng.uniform(-8, 8) for _ in range(6)]
        if whole:
            values = [int(2 ** rng.uniform(0, 53)) for _ in range(6)]
        names = list(range(6))
        chosen = [value for value in values if rng.random() < 0.5]
        limit = sum(chosen)
        row = scale_limit(LinearRow.from_terms(zip(values, names, strict=True), upper=limit))
        if row is None:
            assert sum(values) <= limit
            continue
        coefficients, right = {name: value for value, name in row.terms}, row.upper
        assert max(coefficients.values()) <= 1e3 * max(right, 1.0)
        for mask in range(64):
            used = [name for name in names if mask >> name & 1]
            if sum(values[name] for name in used) <= limit:
                activity = sum(coefficients.get(name, 0.0) for name in used)
                assert activity <= max(0.0, right - 4e-7 * right)
