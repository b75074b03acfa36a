"""The comparison of warm and cold sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from warm_starts import compared, main, ratio

if TYPE_CHECKING:
    from pathlib import Path


def _record(key: str, cpu_s: float, *, warm: bool, status: str = "optimal") -> dict[str, Any]:
    return {"key": key, "name": key, "cpu_s": cpu_s, "warm_start": warm, "status": status}


def test_only_runs_solved_both_ways_with_a_start_are_compared() -> None:
    """The smallest budget has no start, and what a time limit ended says nothing."""
    cold = [_record(key, 2.0, warm=False) for key in "abc"]
    warm = [
        _record("a", 1.0, warm=False),
        _record("b", 1.0, warm=True),
        _record("c", 1.0, warm=True, status="feasible"),
    ]
    assert compared(cold, warm) == [("b", 2.0, 1.0)]


def test_ratio_is_a_shifted_geometric_mean() -> None:
    """0.1 s is added to each time, so that tiny ones do not count; 1 where there is nothing."""
    pairs = [("a", 0.9, 1.9), ("b", 1.9, 0.9), ("c", 0.0, 0.0)]
    assert ratio(pairs) == pytest.approx(1.0)
    assert ratio([("a", 0.9, 0.4)]) == pytest.approx(0.5)
    assert ratio([]) == 1.0


@pytest.mark.slow
def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small model it prints each run and the ratio."""
    arguments = ["--models", "mlp", "--devices", "rpi4b", "--ram", "75%", "85%"]
    assert main(["--out", str(tmp_path), *arguments]) == 0
    assert "1 runs" in capsys.readouterr().out
