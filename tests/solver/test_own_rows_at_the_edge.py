"""Own constraints and objectives at the edge of numbers and of sense, against exhaustive search.

One byte in 2**53, coefficients a thousand million times each other, limits below what a solver's
tolerances see, rows that contradict each other by a hair, rows of nothing, rows of what cannot be.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.claims import answer, row_fault, wrongly_ended
from kit.instances import seeded
from kit.oracle import optimum
from kit.own_rows import scaled_and_constrained
from poetmodel.backends.registry import backend
from poetmodel.device import Costs
from poetmodel.errors import PoetModelError
from poetmodel.graph import Graph, operation
from poetmodel.problem import OWN, Constraint, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

BACKENDS: Final = tuple(
    pytest.param(name, marks=pytest.mark.skipif(not backend(name).available(), reason="missing"))
    for name in ("highs", "scip", "gurobi")
)
EACH_WAY: Final = (
    "lazy",
    pytest.param("compact", marks=pytest.mark.slow),
    pytest.param("unreduced", marks=pytest.mark.seeds),
)
BIG: Final = 2**52


def chain(*sizes: int, ram: int | str = "100%", **changes: Any) -> Problem:
    """Return a problem of nodes ``a``, ``b``, ...; each reads the one before, the last all."""
    names = "abcdefgh"[: len(sizes)]
    nodes = []
    for k, (name, size) in enumerate(zip(names, sizes, strict=True)):
        last = k == len(sizes) - 1
        inputs = tuple(names[:k]) if last else tuple(names[max(0, k - 1) : k])
        nodes.append(operation(name, output_bytes=size, inputs=inputs, recomputable=name != "d"))
    graph = Graph(name="chain", nodes=tuple(nodes))
    n = len(sizes)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1.0 + k for k in range(n)],
        compute_energy_j=[3.0 + 2 * k for k in range(n)],
        page_in=[(0.5, 2.0)] * n,
        page_out=[(0.25, 4.0)] * n,
    )
    return Problem(graph, costs, ram=ram, deadline_counts="serial", **changes)


ROOMY: Final = chain(8, 4, 2, 1)
"""Everything fits; ``d`` is the last, and cannot be computed again."""
TIGHT: Final = chain(5, 4, 3, 2, 1, ram=13)
"""Something must go; ``d`` cannot be computed again."""
HUGE: Final = chain(BIG, BIG - 9, 7, ram=2 * BIG)
BILLION: Final = chain(10**9 + 1, 10**9, 1, 7, ram=2 * 10**9 + 9)

Row = tuple[dict[str, float], float | None, float | None]
"""Coefficients, least value, largest value."""
ROWS: dict[str, tuple[Problem, list[Row]]] = {
    "nothing is at most 1": (TIGHT, [({}, None, 1)]),
    "nothing is at most 0": (TIGHT, [({}, 0, 0)]),
    "nothing is at least 1": (TIGHT, [({}, 1, None)]),
    "nothing is at most -1": (TIGHT, [({}, None, -1)]),
    "nothing of bytes is at least 1": (TIGHT, [({"bytes_written": 0}, 1, None)]),
    "nothing of bytes is at most 1": (TIGHT, [({"bytes_written": 0, "energy_j": 0}, None, 1)]),
    "the last node again": (ROOMY, [({"recomputations:d": 1}, 1, None)]),
    "the last node never again": (ROOMY, [({"recomputations:d": 1}, None, 0)]),
    "once only, again": (TIGHT, [({"recomputations:d": 1}, 1, None)]),
    "once only, less than nothing": (TIGHT, [({"recomputations:d": -1}, None, -0.5)]),
    "as often as there are stages": (ROOMY, [({"recomputations:a": 1}, 3, 3)]),
    "once more than there are stages": (ROOMY, [({"recomputations:a": 1}, 4, None)]),
    "in as often as there are stages": (ROOMY, [({"page_ins:a": 1}, 3, None)]),
    "in too often": (ROOMY, [({"page_ins:a": 1}, 4, None)]),
    "the last tensor in": (ROOMY, [({"page_ins:d": 1}, 1, None)]),
    "the last tensor out": (ROOMY, [({"page_outs:d": 1}, 1, None)]),
    "out twice": (ROOMY, [({"page_outs:a": 1}, 2, None)]),
    "out twice in bytes": (ROOMY, [({"bytes_written": 1}, 16, None)]),
    "all out": (ROOMY, [({"bytes_written": 1}, 15, None)]),
    "in without going out": (TIGHT, [({"page_ins:b": 1}, 1, None), ({"page_outs:b": 1}, None, 0)]),
    "out and never in": (TIGHT, [({"page_outs:a": 1}, 1, 1), ({"page_ins:a": 1}, 0, 0)]),
    "no page-in at all": (TIGHT, [({"bytes_read": 1}, None, 0)]),
    "no recomputation at all": (
        TIGHT, [({f"recomputations:{k}": 1}, 0, 0) for k in "abcde"]
    ),
    "again as often as in": (TIGHT, [({"recomputations:b": 1, "page_ins:a": -1}, 0, 0)]),
    "in as often as again and more": (TIGHT, [({"page_ins:a": 1, "recomputations:a": -1}, 1, 1)]),
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
    "twenty times the same": (TIGHT, [({"page_ins:a": 1, "page_outs:b": 1}, 1, None)] * 20),
    "one that another implies": (
        TIGHT,
        [({"page_ins:a": 1}, 1, None), ({"page_ins:a": 7}, 2, None), ({"page_ins:a": 1}, None, 9)],
    ),
    "energy above the largest": (TIGHT, [({"energy_j": 1}, 1e6, None)]),
    "energy, a little waste": (TIGHT, [({"energy_j": 1}, 60, 61)]),
    "energy of nothing between": (TIGHT, [({"energy_j": 1}, 55.25, 55.75)]),
    "more compute than the deadline": (
        chain(5, 4, 3, 2, 1, ram=13, deadline=16), [({"compute_s": 1}, 17, None)]
    ),
    "transfers as long as recomputations": (
        TIGHT, [({"transfer_s": 1, "recomputations:a": -0.75}, 0, 0), ({"bytes_read": 1}, 1, None)]
    ),
    "energy and time of both signs": (TIGHT, [({"energy_j": 1, "compute_s": -3}, None, -5)]),
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

OBJECTIVES: dict[str, tuple[Problem, dict[str, float]]] = {
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


def with_rows(problem: Problem, rows: list[Row]) -> Problem:
    """Return a problem with rows."""
    stated = tuple(
        Constraint(name=f"row{place}", terms=terms, lower=lower, upper=upper)
        for place, (terms, lower, upper) in enumerate(rows)
    )
    return replace(problem, constraints=stated)


def found_wrong(problem: Problem, way: str, name: str = "highs") -> str:
    """Return what is wrong with the answer to a problem, or nothing."""
    try:
        result = answer(problem, way, backend=name, gap=0.0)
    except PoetModelError as error:
        return f"{type(error).__name__}: {error}"
    return row_fault(problem, optimum(problem), result)


@pytest.mark.parametrize("what", ROWS)
@pytest.mark.parametrize("way", EACH_WAY)
def test_rows_at_the_edge(way: str, what: str) -> None:
    """Each is kept, or shown to be impossible."""
    assert not found_wrong(with_rows(*ROWS[what]), way)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS[1:])
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_rows_at_the_edge_by_other_solvers(way: str, name: str) -> None:
    """The same rows."""
    wrong = {what: found_wrong(with_rows(*rows), way, name) for what, rows in ROWS.items()}
    assert not {what: said for what, said in wrong.items() if said}


@pytest.mark.parametrize("what", OBJECTIVES)
@pytest.mark.parametrize("way", EACH_WAY)
def test_objectives_at_the_edge(way: str, what: str) -> None:
    """Each is as small as it can be."""
    problem, terms = OBJECTIVES[what]
    stated = replace(problem, minimize=OWN, own_objective=tuple(terms.items()))
    assert not found_wrong(stated, way)


@pytest.mark.parametrize("changes", [{"paging": False}, {"recompute": False}, {"aux_bytes": 0}])
@pytest.mark.parametrize("way", EACH_WAY)
def test_what_a_problem_forbids_cannot_be_wanted(way: str, changes: dict[str, Any]) -> None:
    """Rows want what paging, recomputation and room rule out, one by one."""
    for count in ("recomputations", "page_ins", "page_outs"):
        for name in "abcd":
            problem = replace(ROOMY, **changes)
            for lower, upper in ((1, None), (None, 0), (2, 2)):
                row = ({f"{count}:{name}": 1}, lower, upper)
                assert not found_wrong(with_rows(problem, [row]), way), row


# -- at every scale ------------------------------------------------------------------------------


def scaled_faults(numbers: Iterable[int], way: str, name: str) -> dict[int, str]:
    """Return the instances of every scale on which search and a way differ."""
    found = {}
    for number in numbers:
        problem = scaled_and_constrained(seeded(f"scaled rows/{number}"))
        gap = (0.0, 1e-4)[number % 2]
        solved = partial(answer, problem, way, backend=name, gap=gap)
        what = wrongly_ended(problem, solved, gap)
        if what:
            found[number] = what
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_own_rows_hold_at_every_scale(way: str, name: str) -> None:
    """Ten instances with each solver."""
    assert not scaled_faults(range(10), way, name)


@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_a_byte_that_no_solver_sees_is_counted(way: str) -> None:
    """Beside terabytes, of a tensor that no other row names."""
    assert not scaled_faults([161], way, "highs")


@pytest.mark.seeds
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", ["lazy", "compact", "unreduced"])
def test_own_rows_hold_at_every_scale_on_more(way: str, name: str) -> None:
    """Sixty more, 540 in all."""
    assert not scaled_faults(range(10, 70), way, name)
