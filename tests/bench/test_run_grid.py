"""Running the grid: a process a cell, records as they come, resumable, and nothing ends the run."""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import run_grid
from cell_processes import die, wait
from grid import Cell, cells
from records import Recorder
from resuming import FAILED, read_records, still_to_do
from run_grid import Runner, chosen_cells, main

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Cell(goal=1, model="paper/linear", device="paper-m4", ram="70%", limit_s=5.0)
HOPELESS = Cell(goal=1, model="paper/linear", device="paper-m4", ram="1%", limit_s=5.0)


def records_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of records."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cells_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    """Each cell ends as a line of the record, an infeasible one too."""
    path = tmp_path / "run.jsonl"
    Runner(Recorder(path), workers=2).run((SMALL, HOPELESS))
    by_ram = {record["cell"]["ram"]: record for record in records_of(path)}
    assert by_ram["70%"]["status"] == "optimal"
    assert by_ram["1%"]["status"] == "infeasible"
    assert by_ram["70%"]["workers"] == 2
    assert by_ram["70%"]["kind"] == run_grid.KIND


def test_crash_fails_its_cell_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves a record with its exit code, and the next cell is run."""
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(run_grid, "_in_process", die)
    Runner(Recorder(path)).run((SMALL, HOPELESS))
    records = records_of(path)
    assert [record["status"] for record in records] == [FAILED, FAILED]
    assert f"-{signal.SIGKILL.value}" in records[0]["reason"]
    assert records[0]["cell"] == SMALL.to_dict()


def test_cell_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores its limit is killed some time after it."""
    monkeypatch.setattr(run_grid, "_in_process", wait)
    monkeypatch.setattr(run_grid, "GRACE_S", -SMALL.limit_s)
    Runner(Recorder(tmp_path / "run.jsonl")).run((SMALL,))
    record = records_of(tmp_path / "run.jsonl")[0]
    assert record["status"] == FAILED
    assert f"-{signal.SIGKILL.value}" in record["reason"]


def test_stopped_run_records_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way when the run is stopped is dropped, without waiting for it."""
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(run_grid, "_in_process", wait)
    runner = Runner(Recorder(path))
    timer = threading.Timer(0.2, runner.stop.set)
    timer.start()
    runner.run((SMALL, HOPELESS))
    timer.join()
    assert not path.exists()


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    """A record counts if limits are the same and it is no failure."""
    done = {"cell": SMALL.to_dict(), "status": "feasible"}
    failed = {"cell": HOPELESS.to_dict(), "status": FAILED}
    assert still_to_do((SMALL, HOPELESS), (done, failed)) == (HOPELESS,)
    longer = {"cell": SMALL.to_dict() | {"limit_s": 60.0}, "status": "feasible"}
    assert still_to_do((SMALL,), (longer,)) == (SMALL,)
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(done) + "\n" + json.dumps(failed)[:20])
    assert read_records(path) == [done]


def test_command_resumes_after_a_line_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on in a line of its own; without --resume an existing file is left alone."""
    monkeypatch.setattr(run_grid, "cells", lambda _: (SMALL, HOPELESS))
    path = tmp_path / "run-grid.jsonl"
    done = {"cell": SMALL.to_dict(), "status": "feasible"}
    path.write_text(json.dumps(done) + "\n" + '{"cell": {')
    with pytest.raises(SystemExit):
        main(["--out", str(path)])
    assert main(["--out", str(path), "--resume"]) == 0
    assert [record["cell"]["ram"] for record in read_records(path)] == ["70%", "1%"]
    assert path.read_text().splitlines()[1] == '{"cell": {'


def test_cells_with_a_wide_gap_are_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those left above 1 % or without a verdict: not the proved, nor the infeasible."""
    monkeypatch.setattr(run_grid, "cells", lambda _: (SMALL, HOPELESS))
    path = tmp_path / "run-grid.jsonl"
    options = run_grid._options(["--out", str(tmp_path / "new.jsonl"), "--again", str(path)])
    for method, status, gap, chosen in (
        ("default", "feasible", 0.02, (SMALL,)),
        ("default", "feasible", 0.009, ()),
        ("default", "unknown", None, (SMALL,)),
        ("default", "infeasible", None, ()),
        ("paper", "feasible", 0.5, ()),
    ):
        cell = SMALL.to_dict() | {"method": method}
        record = {"name": SMALL.name, "cell": cell, "status": status, "gap": gap}
        path.write_text(json.dumps(record) + "\n")
        assert chosen_cells(options) == chosen


def test_options_choose_cells(tmp_path: Path) -> None:
    """Goals, a part of the name, a limit and a sample narrow the run down."""
    out = ["--out", str(tmp_path / "new.jsonl")]
    parse = run_grid._options
    assert len(chosen_cells(parse(out))) == len(cells())
    chosen = chosen_cells(parse([*out, "--goal", "4", "--only", "paper-m4", "--limit", "7"]))
    assert {cell.model for cell in chosen} == {"paper/bert-24", "paper/bert-48", "paper/bert-96"}
    assert {(cell.device, cell.limit_s) for cell in chosen} == {("paper-m4", 7.0)}
    sample = chosen_cells(parse([*out, "--goal", "1", "--sample", "9"]))
    assert sample == chosen_cells(parse([*out, "--goal", "1"]))[:9]
