"""The page of results says what the records say, time-outs and rejected schedules included."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import make_results
from constraints import TOTALS, WITHOUT
from kit.measured_records import (
    KEY,
    KIB,
    board_record,
    grid_record,
    in_folder,
    own_record,
    solve_record,
    step_record,
    training_record,
    write_records,
)
from mcu.boards import KEEP_ALL
from result_pages import cases

if TYPE_CHECKING:
    from pathlib import Path


SAID = (
    ("results.md", "`bench/results/2026-01-02.jsonl`"),
    ("results.md", "A processor, 2 cores"),
    ("results.md", "## The grid"),
    ("results.md", "From `bench/results/2026-01-02-constraints.jsonl`"),
    ("results.md", "| 0.5 % | optimal |"),
    ("results-grid.md", "| 40% | - | optimal | 2 s |"),
    ("built-in-steps.md", "Generated from `bench/results/2026-01-02-trains.jsonl`"),
    ("built-in-steps.md", "| 2 s |"),
    ("what-trains-where.md", "`bench/results/2026-01-02-mcu.jsonl`"),
    (
        "README.md",
        "| `paper/vgg16-cifar` | `paper-m4` | 50% | 1 % | 25 % | 60.1 s | **120 s**, gap",
    ),
    ("README.md", "| `paper/vgg16-cifar` | `paper-a72` | 50% | 1 % | 0 % | 0.5 s | - |"),
    ("README.md", "2026-01-02, A processor, "),
    ("README.md", "networks with `paper`: 2026-01-05, Another processor. "),
    ("README.md", "the median took 1 times as long as without"),
    (
        "README.md",
        "| `ds-cnn` | `nrf52840` | 256.00 KiB | 700.00 KiB | 64.0 M | 2.00 | 1.5 s | 25 % |",
    ),
)
"""What pages say of the newest records of each kind, by the name of the page."""


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
    """The script writes all pages once, finds them current, and notices a change of any.

    Of each kind the newest file counts, and in it the last line of each run; the beginning of a
    line that was not written to its end does not. Checking needs no plotting library.
    """
    pytest.importorskip("matplotlib")
    readme = in_folder(tmp_path, monkeypatch)
    write_records(tmp_path, "2026-01-01", *records[:1])
    assert make_results.main([]) == 0
    assert "## Training methods" not in (tmp_path / "results.md").read_text()
    model, device, ram = KEY
    paper = {"goal": 5, "model": model, "device": device, "ram": ram, "method": "paper"}
    other = {"goal": 5, "model": model, "device": "paper-a72", "ram": ram, "seconds": 0.5}
    later = {
        "recorded": "2026-01-05T03:04:05+00:00",
        "machine": {**records[0]["machine"], "cpu": "Another processor"},
    }
    grid = (
        grid_record(seconds=9.0),
        grid_record(),
        grid_record(**paper, seconds=120.0, status="feasible", gap=0.4) | later,
        grid_record(**other) | later,
    )
    kept = board_record(KEEP_ALL, ram_bytes=700 * KIB, instructions=32_000_000)
    files = {
        "2026-01-02": records,
        "2026-01-02-grid": grid,
        "2026-01-01-constraints": (own_record(WITHOUT), own_record(TOTALS, seconds=20.0)),
        "2026-01-02-constraints": (own_record(WITHOUT), own_record(TOTALS)),
        "2026-01-01-trains": (step_record(seconds=9.0),),
        "2026-01-02-trains": (step_record(),),
        "2026-01-02-training": (training_record(gap=0.5), training_record(gap=0.005)),
        "2026-01-02-mcu": (board_record(), kept),
    }
    for name, lines in files.items():
        write_records(tmp_path, name, *lines)
        with (tmp_path / f"{name}.jsonl").open("a") as stream:
            stream.write(json.dumps(lines[0])[:40])
    capsys.readouterr()
    assert make_results.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().out
    assert make_results.main([]) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    capsys.readouterr()
    assert make_results.main(["--check"]) == 0
    assert capsys.readouterr().out == ""
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    assert "| 50 % | optimal |" not in pages["results.md"]
    assert pages["README.md"].startswith("A\n")
    assert pages["README.md"].endswith("B\n")
    for name, part in SAID:
        assert part in pages[name]
        (tmp_path / name).write_text(pages[name].replace(part, "something else"))
        assert make_results.main(["--check"]) == 1
        assert f"stale {tmp_path / name}\n" in capsys.readouterr().out
        (tmp_path / name).write_text(pages[name])
    assert readme.read_text() == pages["README.md"]
    write_records(tmp_path, "2026-01-02-grid", grid_record(seconds=3.0, gaps=[]))
    assert make_results.main(["--check"]) == 1
