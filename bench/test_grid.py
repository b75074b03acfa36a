"""Every kind of cell of the grid once, at its smallest size; `run_grid.py` runs the grid itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cases import GAP
from grid import METHODS
from measure import measure
from resuming import FAILED

if TYPE_CHECKING:
    from grid import Cell

pytestmark = pytest.mark.usefixtures("warm")


def test_cell(benchmark: Any, cell: Cell, *, smoke: bool) -> None:
    """Stating, solving and judging one cell."""
    if not smoke:
        pytest.skip("python bench/run_grid.py runs the grid")
    benchmark.group = f"grid {cell.goal}"
    facts = benchmark.pedantic(measure, args=(cell,), rounds=1, iterations=1)
    if METHODS[cell.method].backend != "highs" and facts["status"] == FAILED:
        pytest.skip(facts["reason"])
    benchmark.extra_info.update({name: facts[name] for name in ("status", "gap", "statistics")})
    assert facts["status"] in ("optimal", "feasible")
    assert facts["gap"] <= GAP
