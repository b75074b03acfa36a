"""Rows that contradict each other: found, few, and infeasible by themselves."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from poetmodel.backends.conflict import find_conflict
from poetmodel.backends.standard_form import StandardForm


def form(rows: list[list[float]], upper: list[float], *, integer: bool) -> StandardForm:
    """Return binaries (or shares) with rows ``<= upper``."""
    return StandardForm.from_arrays(
        np.array(rows), np.zeros(len(rows[0])), upper=1.0, row_upper=upper, integer=integer
    )


def test_rows_that_contradict_linearly_are_found_by_highs() -> None:
    """That x + y >= 2 and x - y <= -0.5 is found; y + z <= 2 does not take part."""
    found = find_conflict(
        form([[-1, -1, 0], [0, 1, 1], [1, -1, 0]], [-2, 2, -0.5], integer=True), time_s=10
    )
    assert found == [0, 2]


@pytest.mark.skipif(importlib.util.find_spec("pyscipopt") is None, reason="needs SCIP")
def test_rows_that_contradict_through_integrality_are_found_by_scip() -> None:
    """2 x + 2 y = 1 has a solution in shares, so HiGHS has no say; in whole numbers it has none."""
    model = form([[2, 2, 0], [-2, -2, 0], [0, 1, 1]], [1, -1, 1], integer=True)
    found = find_conflict(model, time_s=10)
    assert found == [0, 1]


def test_one_row_that_its_bounds_rule_out_is_read_off() -> None:
    """That x + y <= -1 of binaries needs no solver."""
    found = find_conflict(form([[1, 0], [1, 1]], [1, -1], integer=True), time_s=10)
    assert found == [1]


def test_nothing_is_claimed_of_a_feasible_model_or_without_time() -> None:
    """Nothing where there is no conflict, and where there is no time to look for one."""
    assert find_conflict(form([[1, 1]], [1], integer=True), time_s=10) == []
    infeasible = form([[-1, -1], [1, -1]], [-2, -0.5], integer=True)
    assert find_conflict(infeasible, time_s=0) == []


def test_rows_that_are_feasible_alone_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of a solver that a solve of its rows does not confirm is dropped."""
    infeasible = form([[-1, -1], [1, -1]], [-2, -0.5], integer=True)
    for name in ("highs", "scip"):
        monkeypatch.setattr(f"poetmodel.backends.{name}.conflicting_rows", lambda *_: [1])
    assert find_conflict(infeasible, time_s=10) == []
