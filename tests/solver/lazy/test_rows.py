"""Which rows an answer breaks."""

from __future__ import annotations

import pytest

from lazy_rounds import relaxation_of
from poetmodel.graph import Graph, operation
from poetmodel.model.grouping import Grouping
from poetmodel.solver.lazy.disaggregation import Placement
from poetmodel.solver.lazy.rows import SLACK, broken_stages, broken_steps, claimed_ram
from worked import skip_problem


@pytest.mark.parametrize(
    ("loads", "worst"),
    [
        ([], []),
        ([5, 5, 5], []),
        ([6, 5, 7], [2, 0]),
        ([5, 6, 7, 6, 5, 8, 9], [6, 2]),
        ([6, 6, 6], [0]),
        ([7, 6, 8, 8], [2]),
    ],
)
def test_the_worst_stage_of_each_run_is_taken(loads: list[float], worst: list[int]) -> None:
    """The worst run first, of equal stages the first; a load at the limit of 5 breaks nothing."""
    assert broken_stages(loads, 5) == worst


def test_a_byte_too_many_is_broken() -> None:
    """However large the limit: bytes are whole, and compare exactly."""
    assert broken_stages([10**12, 10**12 + 1], 10**12) == [1]


def test_the_worst_step_of_each_stage_is_taken() -> None:
    """Stage 3 makes `a` beside an old copy of 8 bytes, and `b`; stage 4 only pages `b` in."""
    graph = Graph(
        name="steps",
        nodes=(
            operation("a", output_bytes=8),
            operation("b", output_bytes=3, inputs=("a",)),
            operation("c", output_bytes=1),
            operation("d", output_bytes=1, inputs=("a", "b")),
            operation("e", output_bytes=1, inputs=("b",)),
        ),
    )
    placement = Placement(graph, spans=[(0, 1, 3)], recomputed=[(3, 0), (3, 1)], paged_in=[(4, 1)])
    assert list(placement.step_loads()) == [(3, 0, 16), (3, 1, 11), (4, 1, 3)]
    assert broken_steps(placement, 10) == [(3, 0)]
    assert broken_steps(placement, 2) == [(3, 0), (4, 1)]
    assert broken_steps(placement, 16) == []


def test_the_budget_is_what_a_point_keeps_within() -> None:
    """Unless the peak is minimized: then it is what the point claims, rounding errors aside."""
    relaxation = relaxation_of(skip_problem(), Grouping(4, frozenset({2})))
    point = [0.0] * relaxation.form.n_columns
    assert claimed_ram(relaxation, point) == 13
    least = relaxation_of(skip_problem(minimize="ram"), Grouping(4, frozenset({2})))
    point = [0.0] * least.form.n_columns
    point[least.column[id(least.model.peak)]] = 12 / 13
    assert claimed_ram(least, point) == pytest.approx(12, rel=2 * SLACK)
    assert claimed_ram(least, point) > 12
    point[least.column[id(least.model.peak)]] = 1.0
    assert claimed_ram(least, point) == 13  # never above the budget
