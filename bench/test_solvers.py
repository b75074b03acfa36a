"""How HiGHS, SCIP and Gurobi fare on two formulations: the cells of ``poetmodel bench solvers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from poetmodel.bench.figures import figure
from poetmodel.bench.measurement import FAILED, UNAVAILABLE, measure
from poetmodel.bench.tables import rows

if TYPE_CHECKING:
    from poetmodel.bench import Cell
    from records import Recorder

pytestmark = pytest.mark.usefixtures("warm")

SMALLEST: Final = ("mlp", "paper/linear")
"""Models of a smoke run."""
SMOKE_LIMIT_S: Final = 2.0
"""Limit of a solve in a smoke run [s]."""
FACTS: Final = ("status", "gap", "model_gap", "columns", "rows", "nodes", "build_s", "solve_s")
"""What is kept of each cell beside its time."""


def chosen(*, smoke: bool) -> tuple[Cell, ...]:
    """Return all cells, or the smallest of each kind."""
    if not smoke:
        return figure("solvers").cells()
    cells = figure("solvers").cells(quick=True, time_limit_s=SMOKE_LIMIT_S)
    return tuple(cell for cell in cells if cell.model in SMALLEST)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the benchmark its cells."""
    cells = chosen(smoke=metafunc.config.getoption("smoke"))
    names = [
        f"{cell.name} | s{cell.settings.seed} | {cell.settings.time_limit_s:g}s" for cell in cells
    ]
    metafunc.parametrize("of", cells, ids=names)


def test_solver(benchmark: Any, of: Cell, recorder: Recorder) -> None:
    """Stating, solving and judging one cell, once; time-outs stay, with their gap."""
    benchmark.group = f"solvers: {of.model}"
    record = benchmark.pedantic(measure, args=(of.to_dict(),), rounds=1, iterations=1)
    if record["status"] == UNAVAILABLE:
        pytest.skip(record["reason"])
    (row,) = rows([record])
    facts = {name: row[name] for name in FACTS}
    benchmark.extra_info.update(facts)
    recorder.write("solver", of.name, seconds=benchmark.stats.stats.min, **facts)
    assert record["status"] != FAILED, record["reason"]
