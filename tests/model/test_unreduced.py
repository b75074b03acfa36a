"""The model with every choice open, on boards without storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instances import random_instances
from oracle import optimum
from poetmodel.model import build
from poetmodel.result import Status
from poetmodel.solver import solve

if TYPE_CHECKING:
    from poetmodel.problem import Problem

PROBLEMS = list(
    random_instances(
        12, (3, 5), seed=7, storage=False, on_aux=False, deadline=False, switches=False
    )
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=map(str, range(len(PROBLEMS))))
def test_without_storage_it_only_recomputes(problem: Problem) -> None:
    """No page costs are needed, and the optimum is that of exhaustive search."""
    expected = optimum(problem)
    result = solve(build(problem, reductions=False), gap=0.0)
    if expected is None:
        assert result.status == Status.INFEASIBLE
        return
    assert result.status == Status.OPTIMAL
    assert result.objective_value == pytest.approx(expected.value, rel=1e-9)
    assert result.require_schedule().M_in == ()
