"""A network on a board, at the smallest size; `mcu/boards.py` runs them all."""

from __future__ import annotations

from typing import Any

import pytest

from mcu.boards import BOARDS, YES, measure_board, smoke_runs
from poetmodel.export.board import Target, missing_programs


def test_exported_step(benchmark: Any, *, smoke: bool) -> None:
    """Exporting, building for host and board, and running one network on both."""
    if not smoke:
        pytest.skip("python bench/mcu/boards.py runs all networks on all boards")
    pytest.importorskip("torch")
    run = next(smoke_runs())
    missing = {*missing_programs(BOARDS[run.board]), *missing_programs(Target.HOST)}
    if missing:
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    facts = benchmark.pedantic(measure_board, args=(run.to_dict(),), rounds=1, iterations=1)
    names = ("status", "instructions", "ram_bytes", "flash_bytes")
    benchmark.extra_info.update({name: facts.get(name) for name in names})
    assert facts["status"] == YES, facts["reason"]
