"""The page of results says what the records say, time-outs and rejected schedules included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import make_results
from kit.measured_records import KEY, grid_record, in_folder, solve_record, write_records
from result_pages import cases

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def records() -> list[Any]:
    """Return the first case, that ran into its limit, and a problem that was proved."""
    return [
        solve_record("default", 60.1, gap=0.25, status="feasible"),
        solve_record("default", 2.0, group="zoo", ram="70%"),
    ]


def test_page_keeps_time_outs_with_their_gap(records: list[Any]) -> None:
    """A solve that ended at its limit is in the table, bold, with the gap that was left."""
    page = cases.page(records, "run.jsonl")
    late, proved = (line for line in page.splitlines() if line.startswith(f"| `{KEY[0]}`"))
    assert "| feasible | 1 % | 25 % | **60.1 s** |" in late
    assert "| optimal | 1 % | 0 % | 2 s |" in proved


def test_pages_are_written_from_the_newest_record(
    records: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script writes both pages once, finds them current, and notices a change."""
    model, device, ram = KEY
    published = {
        **{"goal": 5, "model": model, "device": device, "ram": ram, "method": "paper"},
        **{"seconds": 120.0, "status": "feasible", "gap": 0.4},
    }
    other = {"goal": 5, "model": model, "device": "paper-a72", "ram": ram, "seconds": 0.5}
    later = {
        "recorded": "2026-01-05T03:04:05+00:00",
        "machine": {**records[0]["machine"], "cpu": "Another processor"},
    }
    kept_runs = (
        ("2026-01-01", records[:1]),
        ("2026-01-02", records),
        ("2026-01-02-grid", [grid_record(**each) | later for each in (published, other)]),
    )
    for name, kept in kept_runs:
        write_records(tmp_path, name, *kept)
    readme = in_folder(tmp_path, monkeypatch)
    assert make_results.main(["--check"]) == 1
    assert make_results.main([]) == 0
    capsys.readouterr()
    assert make_results.main(["--check"]) == 0
    assert capsys.readouterr().out == ""
    page = (tmp_path / "results.md").read_text()
    assert "2026-01-02.jsonl" in page
    assert "A processor, 2 cores" in page
    text = readme.read_text()
    assert text.startswith("A\n")
    assert text.endswith("B\n")
    assert (
        "| `paper/vgg16-cifar` | `paper-m4` | 50% | 1 % | 25 % | 60.1 s | **120 s**, gap 40 %"
        in text
    )
    assert "| `paper/vgg16-cifar` | `paper-a72` | 50% | 1 % | 0 % | 0.5 s | - |" in text
    assert "2026-01-02, A processor, " in text
    assert "networks with `paper`: 2026-01-05, Another processor. " in text
    readme.write_text(text.replace("60.1 s |", "1 s |"))
    assert make_results.main(["--check"]) == 1
