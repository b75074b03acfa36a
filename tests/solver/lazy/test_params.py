"""Parameters of the row generation: ranges, and that no answer depends on them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kit.relaxation import CLOSE, no_rows
from kit.worked import comb_problem
from poetmodel.errors import InputError
from poetmodel.result import Termination
from poetmodel.solver.lazy import LazyParams, solve_lazily
from poetmodel.solver.lazy.params import CUT_FAMILIES, HEURISTICS
from poetmodel.solver.request import Request


@pytest.mark.parametrize("field", fields(LazyParams), ids=lambda field: field.name)
def test_every_value_out_of_its_range_is_refused(field: Any) -> None:
    """Ratios above 1, negative times, no round at all, words, names that nothing has."""
    wrong: list[Any] = [frozenset({"unknown"})]
    if field.name not in ("cuts", "heuristics"):
        wrong = [-1, float("nan"), "many", True]
        if field.name.endswith("_ratio"):
            wrong.append(1.5)
        if isinstance(field.default, int):
            wrong.append(0)
    for value in wrong:
        with pytest.raises(InputError, match=field.name):
            LazyParams(**{field.name: value})


def test_all_faults_are_told_at_once() -> None:
    """Not only the first."""
    with pytest.raises(InputError) as raised:
        LazyParams(cut_rounds=0, wide_gap_ratio=2.0)
    assert "cut_rounds" in str(raised.value)
    assert "wide_gap_ratio" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        *(LazyParams(cuts=CUT_FAMILIES - {family}) for family in sorted(CUT_FAMILIES)),
        *(LazyParams(heuristics=HEURISTICS - {part}) for part in sorted(HEURISTICS)),
        LazyParams(cuts=frozenset(), heuristics=frozenset()),
        LazyParams(counted_part_ratio=1.0),
        LazyParams(cut_rounds=1, cuts_per_round=1, rounds_without_gain=1),
        LazyParams(single_row_gain_ratio=0.0),
        LazyParams(few_rows=100, wide_gap_rows=100, single_row_gain_ratio=1.0),
    ],
)
def test_no_answer_depends_on_them(params: LazyParams) -> None:
    """With anything left out the optimum is proved all the same."""
    problem = comb_problem(8, 9, deadline="200%", deadline_counts="serial")
    request = Request(gap=0.0, time_limit_s=300.0)
    usual, other = (
        solve_lazily(problem, request, start=None, first=no_rows(problem), params=given)
        for given in (None, params)
    )
    assert other.termination == Termination.PROVED
    assert usual.candidate is not None
    assert other.candidate is not None
    assert other.candidate.value == pytest.approx(usual.candidate.value, abs=CLOSE)
    assert other.bound == pytest.approx(usual.bound, abs=CLOSE)
