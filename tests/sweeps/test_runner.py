"""Running a sweep: in parallel, resumed, warm, and whatever dies on the way."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import replace
from pathlib import Path

import pytest

from kit import milp
from kit.commands import BOARD, training_step, write_graph
from poetmodel.baselines.running import run_method
from poetmodel.errors import BackendUnavailableError, InputError, LicenceError, WorkersLostError
from poetmodel.process import PROGRAM, ProcessEndedError, WorkerProcess
from poetmodel.schedule import RELATIONS
from poetmodel.sweeps import Run, Settings, Store, grid, measurement, sweep
from poetmodel.sweeps.measurement import fields_before_result, measure_run
from poetmodel.sweeps.runner import shard, sweep_queue
from poetmodel.sweeps.tables import rows
from poetmodel.sweeps.workers import execute_shipped_run, read_user_files

METHODS = ("optimal", "lru-paging")
TIMES = {"recorded", "seconds", "cpu_s", "build_s", "solve_s", "primal_integral_s"}


def _runs(*ram, methods=METHODS):
    return grid(["mlp"], ["rpi4b"], ram=ram or ("75%", "100%"), methods=methods)


class _Pool(Executor):
    """Answers at once, in this process; `deaths` names the runs whose process dies."""

    def __init__(self, deaths, begun):
        self.deaths = deaths
        self.begun = begun

    def submit(self, _, fields=None, start=None, problem=None, /, **__):
        run = Run.from_dict(fields)
        assert problem is None or problem.graph.name == run.model
        self.begun.append((run.name, start and start["of"]))
        future = Future()
        if run.name in self.deaths:
            self.deaths.remove(run.name)
            future.set_exception(ProcessEndedError("a process died"))
        else:
            result = {"problem": {"ram_budget_bytes": 1}}
            schedule = {"of": run.ram} if run.method == "optimal" else None
            future.set_result(
                {
                    **fields_before_result(run),
                    "status": "feasible",
                    "result": result,
                    "schedule": schedule,
                }
            )
        return future


def _run(runs, folder, *, deaths=None, warm=True):
    """Run runs in fake pools; return the started ones, and the reported progress."""
    begun = []
    told = []
    queue = sweep_queue(runs, Store(folder), warm=warm, on_progress=told.append)
    queue.execute(_Pool(deaths or [], begun), 4)
    return begun, told


def _lasting(record):
    """Return a record without times, and without the kind of the pool."""
    result = record["result"] and {
        name: value for name, value in record["result"].items() if name not in TIMES
    }
    kept = {name: value for name, value in record.items() if name not in {*TIMES, "pool"}}
    return {**kept, "result": result}


def test_sweep_in_real_processes(tmp_path):
    """Every run has its record, in the order of the runs; solved ones have a schedule file."""
    runs = _runs()
    records = sweep(runs, tmp_path, workers=1)
    assert [record["key"] for record in records] == [run.key for run in runs]
    assert {record["status"] for record in records} <= {"optimal", "feasible"}
    assert Store(tmp_path).load_schedule(runs[0].key) is not None
    content = (tmp_path / "cells.jsonl").read_bytes()
    assert sweep(runs, tmp_path) == records
    assert (tmp_path / "cells.jsonl").read_bytes() == content


def _descendants(pid, generation=1):
    """Return the worker processes below one, with their generation; needs Linux."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in task.read_text().split():
                if PROGRAM.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found |= {(int(child), generation), *_descendants(child, generation + 1)}
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the processes of Linux")
def test_sweep_with_two_threads_proves_the_same(tmp_path):
    """Each solve has a search in a process of its own, and none is left when the sweep ends."""
    runs = grid(["mobilenetv2"], ["rpi4b"], ram=("40%", "55%"), methods=("optimal",))
    records, seen = {}, {}
    for threads in (1, 2):
        asked = [replace(run, settings=Settings(threads=threads)) for run in runs]
        ended, found = threading.Event(), set()

        def watch(ended=ended, found=found):
            while not ended.wait(0.05):
                found.update(_descendants(os.getpid()))

        watcher = threading.Thread(target=watch)
        watcher.start()
        records[threads] = sweep(asked, tmp_path / str(threads), workers=2)
        ended.set()
        watcher.join()
        seen[threads] = {generation for _, generation in found}
        assert not found & _descendants(os.getpid())
    assert seen == {1: {1}, 2: {1, 2}}
    for one, two in zip(records[1], records[2], strict=True):
        assert one["key"] != two["key"]  # runs of other settings
        assert (one["status"], two["status"]) == ("optimal", "optimal")
        energies = [record["result"]["energy_j"] for record in (one, two)]
        assert energies[0] == pytest.approx(energies[1], rel=1e-4)  # the gap of both


@pytest.mark.slow
def test_killed_process_costs_nothing(tmp_path, monkeypatch):
    """A process that is killed is replaced, and the sweep ends complete."""
    runs = _runs("75%", "80%", "90%", methods=("lru-paging",))
    ends = []
    started = []

    def noted():
        started.append(WorkerProcess())
        return started[-1]

    monkeypatch.setattr("poetmodel.process.WorkerProcess", noted)

    def kill_once(progress):
        if progress.done == 1 and not ends:
            ends.extend(process.pid for process in started)
            for pid in ends:
                os.kill(pid, signal.SIGKILL)

    records = sweep(runs, tmp_path, workers=1, on_progress=kill_once)
    assert ends
    assert [record["status"] for record in records] == ["feasible"] * 3
    assert len(started) == 2
    assert not any(process.is_alive for process in started)


def test_finished_runs_are_not_run_again(tmp_path):
    """Cells with a record are skipped, and count as done; new ones are run."""
    _run(_runs("75%"), tmp_path)
    begun, told = _run(_runs("75%", "100%"), tmp_path)
    assert sorted(begun) == [
        ("mlp | rpi4b | 100% | lru-paging", None),
        ("mlp | rpi4b | 100% | optimal | highs", "75%"),
    ]
    assert (told[0].done, told[0].total, told[0].remaining_s) == (2, 4, None)
    assert (told[-1].done, told[-1].failed, told[-1].remaining_s) == (4, 0, 0.0)


def test_torn_run_is_run_again(tmp_path):
    """A record that was cut off while it was written is made anew, the others stay."""
    runs = _runs()
    _run(runs, tmp_path)
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    begun, _ = _run(runs, tmp_path)
    assert len(begun) == 1
    assert len(Store(tmp_path).finished_records()) == 4


def test_warm_starts_go_along_the_budgets(tmp_path):
    """A larger budget begins with the schedule of the smaller one, unless all starts are cold."""
    runs = _runs("75%", "80%", "100%", methods=("optimal",))
    begun, _ = _run(runs, tmp_path / "warm")
    assert [start for _, start in begun] == [None, "75%", "80%"]
    assert [name.split(" | ")[2] for name, _ in begun] == ["75%", "80%", "100%"]
    begun, _ = _run(_runs("90%", methods=("optimal",)), tmp_path / "warm")
    assert [start for _, start in begun] == [None]
    begun, _ = _run(_runs("75%", "85%", "100%", methods=("optimal",)), tmp_path / "warm")
    assert [start for _, start in begun] == ["75%"]
    begun, _ = _run(runs, tmp_path / "cold", warm=False)
    assert [start for _, start in begun] == [None, None, None]


def test_run_whose_process_dies_is_tried_twice(tmp_path):
    """It is begun again in a new pool; dying twice it is recorded as failed, and run next time."""
    runs = _runs()
    name = runs[0].name
    begun, told = _run(runs, tmp_path / "once", deaths=[name])
    assert [entry[0] for entry in begun].count(name) == 2
    assert told[-1].failed == 0
    begun, told = _run(runs, tmp_path / "twice", deaths=[name, name])
    assert (told[-1].done, told[-1].failed) == (4, 1)
    assert len(Store(tmp_path / "twice").finished_records()) == 3
    begun, told = _run(runs, tmp_path / "twice")
    assert [entry[0] for entry in begun] == [name]
    assert (told[-1].done, told[-1].failed) == (4, 0)


class _Breaking(_Pool):
    """Breaks for good at its third run: by an exception, a cancellation, or its submission."""

    def __init__(self, how):
        super().__init__([], [])
        self.how = how

    def submit(self, *arguments, **_):
        if len(self.begun) < 2:
            return super().submit(*arguments)
        if self.how == "refused":
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        if self.how == "cancelled":
            future.cancel()
            future.set_running_or_notify_cancel()
        else:
            future.set_exception(BrokenExecutor("a worker died"))
        return future


@pytest.mark.parametrize("how", ["broken", "cancelled", "refused"])
def test_broken_pool_leaves_what_is_recorded(how, tmp_path):
    """One sentence states the number of recorded runs; another pool runs only the rest."""
    runs = _runs("75%", "80%", "90%", methods=("lru-paging",))
    queue = sweep_queue(runs, Store(tmp_path), warm=True, on_progress=None)
    with pytest.raises(WorkersLostError, match="2 of 3 runs are recorded"):
        queue.execute(_Breaking(how), 1)
    assert len(Store(tmp_path).finished_records()) == 2
    assert not (tmp_path / "claims").exists()
    begun, _ = _run(runs, tmp_path)
    assert [name for name, _ in begun] == [runs[2].name]


def test_interrupt_that_reaches_another_thread_stops_the_sweep(tmp_path):
    """The runs in progress are not waited for, and their claims are released."""
    future, is_over = Future(), threading.Event()

    def interrupt():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        is_over.wait(60)
        future.set_exception(ProcessEndedError("nobody stopped"))

    class Interrupted(Executor):
        """Starts a run that ends after the sweep; Ctrl-C is sent while the sweep waits for it."""

        def submit(self, *_):
            threading.Timer(0.5, interrupt).start()
            return future

    runs = _runs("75%", "80%", methods=("lru-paging",))
    with pytest.raises(KeyboardInterrupt):
        sweep(runs, tmp_path, pool=Interrupted())
    assert not future.done()
    is_over.set()
    assert not (tmp_path / "claims").exists()


@pytest.mark.slow
def test_pool_of_the_caller_gets_the_files_of_runs(tmp_path, monkeypatch):
    """Graph, device, method, solver and modules beside them are the caller's, not the worker's.

    Records have the caller's names, and the kind of the pool.
    """
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    graph = write_graph(there / "own.graph.json", training_step())
    Path("board.toml").write_text(BOARD)
    Path("alongside.py").write_text("NAME = 'dtr'\n")
    Path("mine.py").write_text(
        "import poetmodel as pm\nfrom alongside import NAME\n"
        "def mine(problem):\n"
        "    return pm.baselines.run(problem, NAME).require_schedule()\n"
        "def bad(problem):\n"
        "    raise ValueError(NAME)\n"
    )
    Path("solver.py").write_text(Path(milp.__file__).read_text())
    runs = grid(
        [graph.name],
        ["board.toml"],
        ram=["1140"],
        methods=["mine.py:mine", f"{there}/mine.py:bad", "../there/mine.py:mine", "optimal"],
        backends=["solver.py:Milp"],
    )
    assert {run.backend for run in runs} == {None, "solver.py:Milp"}
    here = sweep(runs, tmp_path / "here")

    files = read_user_files(runs[0].to_dict())
    names = sorted(Path(name).name for name in files.contents)
    assert names == ["alongside.py", "mine.py"]

    class Elsewhere(Executor):
        """Executes each run at once, where the files of the caller are not found."""

        def submit(self, function, *arguments):
            future = Future()
            there.rename(tmp_path / "hidden")
            monkeypatch.chdir(tmp_path)
            future.set_result(function(*arguments))
            (tmp_path / "hidden").rename(there)
            monkeypatch.chdir(there)
            return future

    elsewhere = sweep(runs, tmp_path / "elsewhere", pool=Elsewhere())
    assert [_lasting(record) for record in elsewhere] == [_lasting(record) for record in here]
    assert {record["pool"] for record in here} == {"poetmodel.LocalProcesses"}
    assert {record["pool"] for record in elsewhere} == {
        f"{__name__.partition('.')[0]}.{Elsewhere.__qualname__}"
    }


def test_another_version_does_no_run():
    """A worker that joins late with another version records failures, which are repeated."""
    (run,) = _runs("75%", methods=("lru-paging",))
    with pytest.raises(InputError, match=r"0\.0\.1"):
        execute_shipped_run("0.0.1", None, False, None, measure_run, run.to_dict())


def test_shards_are_merged(tmp_path):
    """Shards have all runs, each once; a run that failed in one and ended in another has ended."""
    runs = _runs("75%", "80%", "90%")
    parts = [runs[shard(f"{index}/4")] for index in range(1, 5)]
    assert sorted(run.key for part in parts for run in part) == sorted(run.key for run in runs)
    for index, part in enumerate(parts):
        _run(part, tmp_path / f"{index}", deaths=[parts[0][0].name] * 2 if index == 0 else [])
    _run(parts[0], tmp_path / "again")
    store = Store(tmp_path / "all")
    copied = [store.merge(Store(tmp_path / name)) for name in ("0", "1", "2", "3", "again", "1")]
    assert copied == [2, 2, 1, 1, 1, 0]
    assert store.finished_records().keys() == {run.key for run in runs}
    solved = [run for run in runs if run.method == "optimal"]
    assert [store.load_schedule(run.key) for run in solved] == [{"of": run.ram} for run in solved]
    for text in ("0/4", "5/4", "1", "1/x", ""):
        with pytest.raises(InputError):
            shard(text)


def test_runs_of_another_sweep_are_left_to_it(tmp_path):
    """Its claimed runs are awaited, and its recorded ones are not solved again."""
    runs = _runs("75%", "80%", "90%", methods=("lru-paging",))
    other = Store(tmp_path)
    claim = other.claim(runs[1].key)
    assert Store(tmp_path).claim(runs[1].key) is None

    def finish():
        other.add(
            {
                **fields_before_result(runs[1]),
                "status": "feasible",
                "result": None,
                "by": "the other",
            }
        )
        claim.release()

    timer = threading.Timer(0.3, finish)
    timer.start()
    begun, told = _run(runs, tmp_path)
    timer.join()
    assert sorted(name for name, _ in begun) == sorted(runs[k].name for k in (0, 2))
    assert (told[-1].done, told[-1].failed) == (3, 0)
    records = {record["key"]: record for record in Store(tmp_path).records()}
    assert records[runs[1].key]["by"] == "the other"
    assert not (tmp_path / "claims").exists()


def test_claims_of_a_crashed_sweep_are_taken_over(tmp_path):
    """A claim ends with its process, though its file stays."""
    (run,) = _runs("75%", methods=("lru-paging",))
    code = (
        "import os, pathlib, sys\n"
        "from poetmodel.sweeps import Store\n"
        "assert Store(pathlib.Path(sys.argv[1])).claim(sys.argv[2])\n"
        "print('claimed', flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(9)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), run.key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"claimed\n"
        assert Store(tmp_path).claim(run.key) is None
        process.kill()
    assert len(list((tmp_path / "claims").iterdir())) == 1
    begun, _ = _run((run,), tmp_path)
    assert [name for name, _ in begun] == [run.name]


def test_chain_of_starts_goes_on_where_another_sweep_has_ended_it(tmp_path):
    """The schedule that another sweep has found for the smaller budget starts the larger one."""
    small, large = _runs("75%", "100%", methods=("optimal",))
    other = Store(tmp_path)
    claim = other.claim(small.key)

    def finish():
        record = {
            **fields_before_result(small),
            "status": "optimal",
            "result": None,
            "schedule": {"of": "other"},
        }
        other.add(record)
        claim.release()

    timer = threading.Timer(0.3, finish)
    timer.start()
    begun, _ = _run((small, large), tmp_path)
    timer.join()
    assert begun == [(large.name, "other")]


# -- one run -------------------------------------------------------------------------------------
def _one_run(method, ram="70%"):
    return grid(["mlp"], ["rpi4b"], ram=[ram], methods=[method])[0]


def test_record_says_everything_but_the_relations():
    """Figures, versions, seed and machine are in the record; the schedule is apart from them."""
    one = replace(_one_run("optimal"), settings=Settings(seed=3))
    record = measure_run(one.to_dict())
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))
    assert (record["status"], record["key"]) == ("optimal", one.key)
    assert record["cell"]["settings"]["seed"] == 3
    assert record["result"]["energy_j"] > record["result"]["baseline_energy_j"]
    assert record["machine"]["versions"]["poetmodel"]
    in_checkout = (Path(measurement.__file__).parents[3] / ".git").exists()
    assert re.fullmatch("[0-9a-f]{7,40}" if in_checkout else "None", str(record["commit"]))
    assert record["versions"]["highspy"]
    assert not set(RELATIONS) & set(record["result"])
    assert record["schedule"]["R"]
    assert {"written_by", "costs"} == record["schedule"].keys() & {"written_by", "costs"}
    assert not {"written_by", "costs"} & record["result"].keys()
    assert record["counts"]["paged_in"] == len(record["schedule"]["M_in"])


def test_heuristics_have_records_too():
    """A method without a solver is feasible, with its own figures."""
    record = measure_run(_one_run("lru-paging").to_dict())
    assert record["status"] == "feasible"
    assert record["cell"]["backend"] is None
    assert record["counts"]["recomputed"] == 0


def test_start_is_used(monkeypatch):
    """The schedule of a smaller budget starts the solve of a larger one, in methods that solve."""
    small = measure_run(_one_run("optimal", "75%").to_dict())
    given = []

    def watched(problem, request, start=None):
        given.append(start)
        return run_method(problem, request, start)

    monkeypatch.setattr("poetmodel.sweeps.measurement.run_method", watched)
    record = measure_run(_one_run("optimal", "85%").to_dict(), small["schedule"])
    assert record["warm_start"] is True
    assert record["status"] == "optimal"
    assert [list(pair) for pair in given[0].R] == small["schedule"]["R"]
    measure_run(_one_run("dtr", "85%").to_dict(), small["schedule"])
    assert given[1] is None


def test_homes_of_state_are_in_the_record_and_in_the_start(monkeypatch, tmp_path):
    """The schedule of a record lists resident tensors, and starts a solve with them."""
    path = write_graph(tmp_path / "step.graph.json", training_step())
    board = tmp_path / "board.toml"
    board.write_text(BOARD)
    runs = grid([str(path)], [str(board)], ram=["900", "1140"], methods=["optimal"])
    small = measure_run(runs[0].to_dict())
    assert small["schedule"]["resident"] == [4]
    assert "resident" not in small["result"]
    assert small["state"]["resident_bytes"] == 300
    assert small["state"]["written_back_bytes"] == 200
    assert rows([small])[0]["state_on_storage_bytes"] == 200
    given = []

    def watched(problem, request, start=None):
        given.append(start)
        return run_method(problem, request, start)

    monkeypatch.setattr("poetmodel.sweeps.measurement.run_method", watched)
    larger = measure_run(runs[1].to_dict(), small["schedule"])
    assert given[0].resident == (4,)
    assert larger["schedule"]["resident"] == [1, 4]


def test_what_does_not_apply_is_told_apart_from_what_failed():
    """A refusal has its reason; a solver that is not there, and nonsense, are no answers."""
    refused = measure_run(_one_run("checkpoint-all", "70%").to_dict())
    assert refused["status"] == "not-applicable"
    assert "checkpoint-all" in refused["reason"]
    assert refused["result"] is None
    broken = measure_run(replace(_one_run("optimal"), backend="none").to_dict())
    assert broken["status"] == "failed"
    assert "backend 'none'" in broken["reason"]
    unknown = measure_run(replace(_one_run("optimal"), model="none").to_dict())
    assert unknown["status"] == "failed"
    assert "no such model" in unknown["reason"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(LicenceError("too large"), "refused"), (BackendUnavailableError("gone"), "not-installed")],
)
def test_refusal_is_told_apart_from_a_missing_solver(error, status, monkeypatch):
    """Each has a status of its own, the reason, and no result."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(measurement, "run_method", fail)
    record = measure_run(_one_run("optimal").to_dict())
    assert (record["status"], record["reason"]) == (status, str(error))
    assert record["result"] is None


def test_loading_is_not_measured(monkeypatch):
    """Before the clock starts the method has solved a small problem by the same solver, once."""
    calls = []

    def watched(problem, request, start=None):
        calls.append((problem.graph.name, request.method, request.backend))
        return run_method(problem, request, start)

    monkeypatch.setattr(measurement, "run_method", watched)
    measurement._warm_up.cache_clear()
    for _ in range(2):
        measure_run(_one_run("optimal").to_dict())
    optimal = ("optimal", "highs")
    assert calls == [("warm-up", *optimal), ("mlp", *optimal), ("mlp", *optimal)]
    measure_run(_one_run("lru-paging").to_dict())
    assert [call[:2] for call in calls[3:]] == [("warm-up", "lru-paging"), ("mlp", "lru-paging")]
