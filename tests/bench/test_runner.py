"""The runner of studies: options, a process for each run, immediate records, and resumption."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

import grid
from grid import KIND, Instance
from harness import (
    REQUIRED,
    Cell,
    ThisProcess,
    make_record,
    measure_peak_memory_bytes,
    measure_with_cpu_limit,
    run_study,
)
from kit.jobs import raise_lookup_error
from kit.run_processes import kill_process, wait_forever
from poetmodel.errors import BackendUnavailableError
from poetmodel.sweeps.measurement import FAILED
from studies import STUDIES, load_study, main

SMALL = Instance(goal=1, model="paper/linear", device="paper-m4", ram="70%", limit_s=5.0)
HOPELESS = replace(SMALL, ram="1%")


def two_instances(**changes):
    """Return the study of the grid with two instances, and other changes."""
    return replace(grid.STUDY, **{"runs": lambda: (SMALL, HOPELESS), **changes})


def records_of(path):
    """Return the lines of a file of records."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- options ---------------------------------------------------------------------------------------
def test_command_needs_a_study(capsys):
    """Without one, it lists them."""
    assert main([]) == main(["nothing"]) == 2
    assert ", ".join(STUDIES) in capsys.readouterr().err


def test_settings_choose_instances(tmp_path, monkeypatch):
    """Goals, a part of the name, a limit and a sample narrow the run down."""
    seen = []
    monkeypatch.setattr("harness.run_all", lambda runs, *_: seen.extend(runs) or 0)
    out = ["--out", str(tmp_path / "new.jsonl")]

    def chosen(*options):
        seen.clear()
        assert run_study(grid.STUDY, [*out, *options]) == 0
        return list(seen)

    assert set(chosen()) == set(grid.instances((1, 2, 3, 4, 5)))
    found = chosen("--set", "goals=4", "--only", "paper-m4", "--limit", "7")
    assert {each.model for each in found} == {"paper/bert-24", "paper/bert-48", "paper/bert-96"}
    assert {(each.device, each.limit_s) for each in found} == {("paper-m4", 7.0)}
    both = chosen("--set", "goals=1,4", "--set", "sample=9")
    assert len(both) == 9
    assert both == chosen("--set", "goals=(1, 4)")[:9]


def test_wrong_settings_are_told(tmp_path, capsys):
    """An unknown name, and a missing one, end with a sentence."""
    out = ["--out", str(tmp_path / "new.jsonl")]
    required = two_instances(settings={"checkout": REQUIRED})
    for study, more, words in (
        (grid.STUDY, ["--set", "goal=1"], "goal: expected one of goals, again, sample, threads"),
        (required, [], "checkout=VALUE is missing"),
    ):
        with pytest.raises(SystemExit):
            run_study(study, [*out, *more])
        assert words in capsys.readouterr().err


def test_instances_with_a_large_gap_are_chosen_again(tmp_path):
    """Those left above 1 % or without a verdict: not the proved, nor the infeasible."""
    path = tmp_path / "run-grid.jsonl"
    instance = grid.instances((6,))[0]
    for method, status, gap, chosen in (
        ("default", "feasible", 0.02, True),
        ("default", "feasible", 0.009, False),
        ("default", "unknown", None, True),
        ("default", "infeasible", None, False),
        ("paper", "feasible", 0.5, False),
    ):
        cell = instance.to_dict() | {"method": method}
        line = {"name": instance.name, "cell": cell, "status": status, "gap": gap}
        path.write_text(json.dumps(line) + "\n")
        assert grid.runs(again=str(path)) == ((instance,) if chosen else ())


# -- processes -------------------------------------------------------------------------------------
def test_runs_are_measured_in_processes_of_their_own(tmp_path):
    """Each ends as a line of the record, an infeasible one too."""
    path = tmp_path / "run.jsonl"
    options = ["--out", str(path), "--workers", "2", "--set", "threads=2"]
    assert run_study(two_instances(), options) == 0
    by_ram = {each["cell"]["ram"]: each for each in records_of(path)}
    assert (by_ram["70%"]["status"], by_ram["1%"]["status"]) == ("optimal", "infeasible")
    for each in by_ram.values():
        assert (each["workers"], each["threads"], each["kind"]) == (2, 2, KIND)


def test_crash_fails_its_run_only(tmp_path):
    """A process that is killed leaves a record with its exit code, and the next one is run."""
    path = tmp_path / "run.jsonl"
    study = two_instances(measure=kill_process, preloaded=())
    assert run_study(study, ["--out", str(path)]) == 0
    records = records_of(path)
    assert [each["status"] for each in records] == [FAILED, FAILED]
    assert f"-{signal.SIGKILL.value}" in records[0]["reason"]


@pytest.mark.slow
def test_exception_fails_its_run_only(tmp_path):
    """Its record names class and message."""
    path = tmp_path / "run.jsonl"
    study = two_instances(measure=raise_lookup_error)
    assert run_study(study, ["--out", str(path)]) == 0
    reasons = [each["reason"] for each in records_of(path)]
    assert reasons == ["LookupError: of its own"] * 2


def test_run_that_never_ends_is_ended(tmp_path):
    """A process that ignores its limit is killed some time after it."""
    path = tmp_path / "run.jsonl"
    study = two_instances(measure=wait_forever, grace_s=-SMALL.limit_s, preloaded=())
    assert run_study(study, ["--out", str(path), "--only", "70%"]) == 0
    (found,) = records_of(path)
    assert (found["status"], found["seconds"] > 0) == (FAILED, True)


def test_interrupted_run_records_nothing_more(tmp_path, capsys):
    """Runs in progress are dropped at once if the study is interrupted."""
    path = tmp_path / "run.jsonl"
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    start = {"start_of": lambda *_: timer.start(), "preloaded": ()}
    study = two_instances(measure=wait_forever, **start)
    assert run_study(study, ["--out", str(path)]) == 130
    timer.join()
    assert not path.exists()
    assert "--resume goes on" in capsys.readouterr().err


def test_run_resumes_after_a_line_that_was_cut_off(tmp_path):
    """A resumed study repeats failed runs and adds those with new limits.

    Without --resume, an existing file is refused.
    """
    path = tmp_path / "run-grid.jsonl"
    done = {"cell": SMALL.to_dict(), "status": "feasible"}
    failed = {"cell": HOPELESS.to_dict(), "status": FAILED}
    path.write_text(json.dumps(done) + "\n" + json.dumps(failed) + "\n" + '{"cell": {')
    out = ["--out", str(path)]
    study = two_instances(
        has_own_process=False, measure=lambda cell, _: make_record(KIND, "done now", cell=cell)
    )
    with pytest.raises(SystemExit):
        run_study(study, out)
    assert run_study(study, [*out, "--resume"]) == 0
    assert [each["cell"]["ram"] for each in records_of(path)] == ["70%", "1%", "1%"]
    more = ["--resume", "--only", "70%", "--limit", "7"]
    assert run_study(study, [*out, *more]) == 0
    assert records_of(path)[-1]["cell"]["limit_s"] == 7.0


def test_studies_of_one_process_raise_what_goes_wrong(tmp_path):
    """Their measurements may raise; a record without a status is done."""
    cells = [Cell("one", {"x": 1}), Cell("two", {"x": 0})]
    study = two_instances(
        has_own_process=False,
        runs=lambda: cells,
        measure=lambda cell, _: make_record("k", "n", cell=cell, y=1 / cell["x"]),
    )
    path = tmp_path / "x.jsonl"
    with pytest.raises(ZeroDivisionError):
        run_study(study, ["--out", str(path)])
    (found,) = records_of(path)
    assert (found["status"], found["cell"]) == ("done", {"x": 1})
    assert ThisProcess().submit(int, "7").result() == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid", "against", "compared"])
def test_runs_of_a_study_have_keys_of_their_own(name):
    """Smoke runs, too; every key is that of the fields."""
    study = load_study(name)
    for runs in (list(study.runs()), list(study.smoke_runs())):
        assert len({run.key for run in runs}) == len(runs) > 0
        assert all(run.with_limit(1.0).to_dict()["limit_s"] == 1.0 for run in runs[:5])


# -- one instance ----------------------------------------------------------------------------------
def test_refusal_is_recorded_with_its_reason(monkeypatch):
    """A missing solver or a licence that is too small fails that instance only."""

    def refuse(*_, **__):
        raise BackendUnavailableError("no licence for that")

    monkeypatch.setattr(grid.pm, "solve", refuse)
    facts = grid.measure(SMALL.to_dict())
    assert facts["status"] == FAILED
    assert facts["reason"] == "BackendUnavailableError: no licence for that"
    assert facts["cell"] == SMALL.to_dict()


def test_peak_memory_of_another_process_is_told_apart():
    """The peak memory of an ended child process is measured."""
    took = 300_000_000
    command = (sys.executable, "-c", f"bytearray({took})[::4096] = bytes(-(-{took} // 4096))")
    subprocess.run(command, check=True)
    assert measure_peak_memory_bytes(resource.RUSAGE_CHILDREN) >= took


# -- limits in processor time ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("busy_s", "attempts"), [((0.4, 1.0), 2), ((1.0,), 1), ((0.2, 0.3, 0.9), 3)]
)
def test_run_without_its_processor_time_is_repeated(busy_s, attempts, monkeypatch):
    """One that met its limit of 1 s with less than 0.8 s is made again, with more wall time."""
    clock = SimpleNamespace(wall_s=0.0, cpu_s=0.0)
    monkeypatch.setattr(
        "harness.time",
        SimpleNamespace(perf_counter=lambda: clock.wall_s, process_time=lambda: clock.cpu_s),
    )
    limits = []

    def measure(wall_s):
        clock.cpu_s += busy_s[len(limits)]
        limits.append(wall_s)
        clock.wall_s += wall_s
        return {"status": "unknown", "termination": "time_limit"}

    found = measure_with_cpu_limit(1.0, measure)
    assert (found["attempts"], found["cpu_s"]) == (attempts, pytest.approx(busy_s[-1]))
    assert limits == sorted(limits)


def test_run_that_never_has_a_core_fails():
    """It is repeated when the record is resumed; one that ended by itself needs no more."""
    found = measure_with_cpu_limit(
        1e6, lambda _: {"status": "unknown", "termination": "time_limit"}
    )
    assert found["status"] == FAILED
    done = measure_with_cpu_limit(1e6, lambda _: {"status": "feasible", "termination": "stalled"})
    assert (done["status"], done["attempts"]) == ("feasible", 1)
