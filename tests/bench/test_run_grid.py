"""Running the grid: a process an instance, records as they come, resumable, and nothing ends it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import run_grid
from grid import Instance, instances
from kit.run_processes import die, wait
from poetmodel.bench.measurement import FAILED
from poetmodel.errors import BackendUnavailableError
from poetmodel.solver import SolveProgress
from run_grid import Course, chosen_instances, main, measure, peak_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Instance(goal=1, model="paper/linear", device="paper-m4", ram="70%", limit_s=5.0)
HOPELESS = Instance(goal=1, model="paper/linear", device="paper-m4", ram="1%", limit_s=5.0)


@pytest.fixture(autouse=True)
def _two_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the grid have two instances."""
    monkeypatch.setattr(run_grid, "instances", lambda _: (SMALL, HOPELESS))


def records_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of records."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- one instance ----------------------------------------------------------------------------------


def test_course_notes_the_first_schedule_and_each_fall_of_the_gap() -> None:
    """Gaps that fall by little are left out, the first schedule and a closed gap never."""
    course = Course()
    states = [(0.1, None, 1.0), (0.2, 4.0, 1.0), (0.3, 3.99, 1.0), (0.4, 2.0, 1.0), (0.5, 1.0, 1.0)]
    for seconds, incumbent, bound in (*states, (0.6, 1.0, 1.0)):
        course.note(SolveProgress(seconds=seconds, incumbent=incumbent, bound=bound))
    assert course.first_schedule_s == 0.2
    assert course.gaps == [(0.2, 0.75), (0.4, 0.5), (0.5, 0.0)]


def test_measurement_is_plain_data_and_ends_where_the_solve_ended() -> None:
    """A proved instance has its gap, its course down to it, and nothing that JSON refuses."""
    facts = measure(SMALL.to_dict())
    json.dumps(facts, allow_nan=False)
    assert facts["cell"] == SMALL.to_dict()
    assert facts["status"] == "optimal"
    assert facts["gap"] <= facts["requested_gap"]
    assert 0 < facts["first_schedule_s"] <= facts["seconds"]
    assert facts["gaps"][-1][1] <= facts["requested_gap"]
    assert facts["overhead_bound_j"] <= facts["overhead_j"] * (1 + 1e-9)
    assert facts["peak_memory_bytes"] > 2**20
    assert facts["worker_memory_bytes"] >= 0
    assert facts["versions"]["poetmodel"]


def test_paper_has_the_gap_of_its_own_model() -> None:
    """What ``paper`` proves is of its model, which is not the problem's."""
    facts = measure(replace(SMALL, method="paper", ram="90%", limit_s=30.0).to_dict())
    assert facts["formulation"] == "paper"
    assert facts["gap"] <= facts["requested_gap"]
    assert facts["overhead_bound_j"] == 0.0
    assert facts["statistics"]["columns"] > 2000


def test_budget_below_the_floor_is_proved_infeasible() -> None:
    """An instance that nothing can solve is a result like any other."""
    facts = measure(HOPELESS.to_dict())
    assert facts["status"] == "infeasible"
    assert facts["ram_budget_bytes"] < facts["floor_bytes"]
    assert facts["first_schedule_s"] is None
    assert facts["gaps"] == []


def test_refusal_is_recorded_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing solver or a licence that is too small fails that instance only."""

    def refuse(*_: object, **__: object) -> None:
        raise BackendUnavailableError("no licence for that")

    monkeypatch.setattr(run_grid.pm, "solve", refuse)
    facts = measure(SMALL.to_dict())
    assert facts["status"] == FAILED
    assert facts["reason"] == "BackendUnavailableError: no licence for that"
    assert facts["cell"] == SMALL.to_dict()


def test_peak_memory_counts_what_was_ever_resident() -> None:
    """Memory that was given back still counts."""
    before = peak_memory_bytes()
    block = bytearray(before + 50_000_000)
    block[::4096] = bytes(len(block[::4096]))
    del block
    assert peak_memory_bytes() >= before + 40_000_000


def test_peak_memory_of_another_process_is_told_apart() -> None:
    """What a process took that was started and has ended counts for itself."""
    took = 300_000_000
    command = (sys.executable, "-c", f"bytearray({took})[::4096] = bytes(-(-{took} // 4096))")
    subprocess.run(command, check=True)
    assert peak_memory_bytes(resource.RUSAGE_CHILDREN) >= took


# -- the command -----------------------------------------------------------------------------------


def test_instances_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    """Each instance ends as a line of the record, an infeasible one too."""
    path = tmp_path / "run.jsonl"
    assert main(["--out", str(path), "--workers", "2", "--threads", "2"]) == 0
    by_ram = {record["cell"]["ram"]: record for record in records_of(path)}
    assert by_ram["70%"]["status"] == "optimal"
    assert by_ram["1%"]["status"] == "infeasible"
    for record in by_ram.values():
        assert (record["workers"], record["threads"], record["kind"]) == (2, 2, run_grid.KIND)


def test_crash_fails_its_instance_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves a record with its exit code, and the next one is run."""
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(run_grid, "measure_warm", die)
    assert main(["--out", str(path)]) == 0
    records = records_of(path)
    assert [record["status"] for record in records] == [FAILED, FAILED]
    assert f"-{signal.SIGKILL.value}" in records[0]["reason"]
    assert {record["cell"]["ram"] for record in records} == {"1%", "70%"}


def test_instance_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores its limit is killed some time after it."""
    monkeypatch.setattr(run_grid, "measure_warm", wait)
    monkeypatch.setattr(run_grid, "GRACE_S", -SMALL.limit_s)
    assert main(["--out", str(tmp_path / "run.jsonl"), "--sample", "1"]) == 0
    (record,) = records_of(tmp_path / "run.jsonl")
    assert record["status"] == FAILED
    assert record["seconds"] > 0
    assert f"-{signal.SIGKILL.value}" in record["reason"]


def test_interrupted_run_records_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is under way when the run is stopped is dropped, without waiting for it."""
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(run_grid, "measure_warm", wait)
    monkeypatch.setattr(run_grid, "warm_up", lambda: None)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert main(["--out", str(path)]) == 130
    timer.join()
    assert not path.exists()
    assert "--resume goes on" in capsys.readouterr().err


def test_run_resumes_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    """What failed or has other limits is run; without --resume an existing file is left alone."""
    path = tmp_path / "run-grid.jsonl"
    done = {"cell": SMALL.to_dict(), "status": "feasible"}
    failed = {"cell": HOPELESS.to_dict(), "status": FAILED}
    path.write_text(json.dumps(done) + "\n" + json.dumps(failed) + "\n" + '{"cell": {')
    with pytest.raises(SystemExit):
        main(["--out", str(path)])
    assert main(["--out", str(path), "--resume"]) == 0
    assert [record["cell"]["ram"] for record in records_of(path)] == ["70%", "1%", "1%"]
    assert main(["--out", str(path), "--resume", "--only", "70%", "--limit", "7"]) == 0
    assert records_of(path)[-1]["cell"]["limit_s"] == 7.0


def test_instances_with_a_large_gap_are_chosen_again(tmp_path: Path) -> None:
    """Those left above 1 % or without a verdict: not the proved, nor the infeasible."""
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
        assert chosen_instances(options) == chosen


def test_options_choose_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goals, a part of the name, a limit and a sample narrow the run down."""
    monkeypatch.setattr(run_grid, "instances", instances)
    out = ["--out", str(tmp_path / "new.jsonl")]
    parse = run_grid._options
    assert set(chosen_instances(parse(out))) == set(instances((1, 2, 3, 4, 5)))
    chosen = chosen_instances(parse([*out, "--goal", "4", "--only", "paper-m4", "--limit", "7"]))
    assert {each.model for each in chosen} == {"paper/bert-24", "paper/bert-48", "paper/bert-96"}
    assert {(each.device, each.limit_s) for each in chosen} == {("paper-m4", 7.0)}
    captured = instances((6,))[0]
    record = {"name": captured.name, "cell": captured.to_dict(), "status": "unknown", "gap": None}
    (tmp_path / "captures.jsonl").write_text(json.dumps(record) + "\n")
    again = chosen_instances(parse([*out, "--again", str(tmp_path / "captures.jsonl")]))
    assert again == (captured,)
    sample = chosen_instances(parse([*out, "--goal", "1", "--sample", "9"]))
    assert sample == chosen_instances(parse([*out, "--goal", "1"]))[:9]
