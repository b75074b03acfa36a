"""Running a sweep: in parallel, resumed, warm, and whatever dies on the way."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor, Executor, Future

import pytest

from poetmodel.bench import Run, Store, grid, sweep
from poetmodel.bench.measurement import blank
from poetmodel.bench.runner import sweep_queue
from poetmodel.errors import InputError
from poetmodel.process import WorkerProcess

METHODS = ("optimal", "lru-paging")


def _runs(*ram, methods=METHODS):
    return grid(["mlp"], ["rpi4b"], ram=ram or ("75%", "100%"), methods=methods)


class _Pool(Executor):
    """Answers at once, in this process; `deaths` says for which runs it breaks."""

    def __init__(self, deaths, begun):
        self.deaths = deaths
        self.begun = begun

    def submit(self, _, fields=None, start=None, /, **__):
        run = Run.from_dict(fields)
        self.begun.append((run.name, start and start["of"]))
        future = Future()
        if run.name in self.deaths:
            self.deaths.remove(run.name)
            future.set_exception(BrokenExecutor("a process died"))
        else:
            result = {"problem": {"ram_budget_bytes": 1}}
            schedule = {"of": run.ram} if run.method == "optimal" else None
            future.set_result(
                {**blank(run), "status": "feasible", "result": result, "schedule": schedule}
            )
        return future


def _run(runs, folder, *, deaths=None, warm=True):
    """Run runs in made-up pools; return what was begun, and the progress that was told."""
    begun = []
    told = []
    queue = sweep_queue(runs, Store(folder), warm=warm, on_progress=told.append)
    queue.run(_Pool(deaths or [], begun), lambda: 4)
    return begun, told


def test_sweep_in_real_processes(tmp_path):
    """Every run has its record, in the order of the runs; solved ones have a schedule file."""
    runs = _runs()
    records = sweep(runs, tmp_path, workers=1)
    assert [record["key"] for record in records] == [run.key for run in runs]
    assert {record["status"] for record in records} <= {"optimal", "feasible"}
    assert Store(tmp_path).schedule(runs[0].key) is not None
    content = (tmp_path / "cells.jsonl").read_bytes()
    assert sweep(runs, tmp_path) == records
    assert (tmp_path / "cells.jsonl").read_bytes() == content


@pytest.mark.slow
def test_killed_process_costs_nothing(tmp_path, monkeypatch):
    """A process that is killed is replaced, and the sweep ends complete."""
    runs = _runs("75%", "80%", "90%", methods=("lru-paging",))
    ends = []
    started = []

    def noted():
        started.append(WorkerProcess())
        return started[-1]

    monkeypatch.setattr("poetmodel.bench.workers.WorkerProcess", noted)

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
    assert len(Store(tmp_path).finished()) == 4


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
    assert len(Store(tmp_path / "twice").finished()) == 3
    begun, told = _run(runs, tmp_path / "twice")
    assert [entry[0] for entry in begun] == [name]
    assert (told[-1].done, told[-1].failed) == (4, 0)


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ("tcp://127.0.0.1:9", "cannot be reached"),
        ("127.0.0.1:9", "cannot be reached"),
        ("tcp://127.0.0.1:99999", "cannot be reached"),
        ("tcp://[::1]:9", "cannot be reached"),
        ("tcp://127.0.0.1", "expected an address such as tcp://"),
        ("http://127.0.0.1:9", "expected an address such as tcp://"),
        ("nonsense", "expected an address such as tcp://"),
        ("", "expected an address such as tcp://"),
    ],
)
def test_unreachable_scheduler(scheduler, said, tmp_path):
    """An address that is none, or at which nobody answers, is named; no folder is made."""
    pytest.importorskip("distributed")
    with pytest.raises(InputError, match=said):
        sweep(_runs(), tmp_path / "sweep", scheduler=scheduler)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("banner", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"short"])
def test_what_listens_and_is_no_scheduler(banner, tmp_path, monkeypatch):
    """A server that is silent, or greets otherwise than Dask, is told from one in time."""
    pytest.importorskip("distributed")
    monkeypatch.setattr("poetmodel.bench.workers.CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.sendall(banner)
            if banner == b"short":
                connection.close()
            else:
                kept.append(connection)

        kept = []
        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=r"no Dask scheduler|cannot be reached"):
            sweep(_runs(), tmp_path / "sweep", scheduler=f"tcp://127.0.0.1:{port}")
        thread.join()
        for connection in kept:
            connection.close()


def test_runs_of_another_sweep_are_left_to_it(tmp_path):
    """What it has claimed is waited for, and what it has recorded is not solved again."""
    runs = _runs("75%", "80%", "90%", methods=("lru-paging",))
    other = Store(tmp_path)
    claim = other.claim(runs[1].key)
    assert Store(tmp_path).claim(runs[1].key) is None

    def finish():
        other.add({**blank(runs[1]), "status": "feasible", "result": None, "by": "the other"})
        claim.release()

    timer = threading.Timer(0.3, finish)
    timer.start()
    begun, told = _run(runs, tmp_path)
    timer.join()
    assert sorted(name for name, _ in begun) == sorted(runs[k].name for k in (0, 2))
    assert (told[-1].done, told[-1].failed) == (3, 0)
    records = {record["key"]: record for record in Store(tmp_path).records()}
    assert records[runs[1].key]["by"] == "the other"
    assert list((tmp_path / "claims").iterdir()) == []


def test_claims_of_a_crashed_sweep_are_taken_over(tmp_path):
    """A claim ends with its process, though its file stays."""
    (run,) = _runs("75%", methods=("lru-paging",))
    code = (
        "import os, pathlib, sys\n"
        "from poetmodel.bench import Store\n"
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
    assert (tmp_path / "claims" / run.key).exists()
    begun, _ = _run((run,), tmp_path)
    assert [name for name, _ in begun] == [run.name]


def test_chain_of_starts_goes_on_where_another_sweep_has_ended_it(tmp_path):
    """The schedule that another sweep has found for the smaller budget starts the larger one."""
    small, large = _runs("75%", "100%", methods=("optimal",))
    other = Store(tmp_path)
    claim = other.claim(small.key)

    def finish():
        record = {**blank(small), "status": "optimal", "result": None, "schedule": {"of": "other"}}
        other.add(record)
        claim.release()

    timer = threading.Timer(0.3, finish)
    timer.start()
    begun, _ = _run((small, large), tmp_path)
    timer.join()
    assert begun == [(large.name, "other")]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_cluster_survives_the_death_of_a_worker(tmp_path):
    """On a real Dask cluster of two workers, one of which is killed, the sweep ends complete."""
    distributed = pytest.importorskip("distributed")
    runs = _runs("75%", "80%", "85%", "90%", "95%", "100%", methods=METHODS)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as local:
        killed = []

        def kill_once(progress):
            if progress.done == 2 and not killed:
                process = next(iter(local.workers.values())).process
                killed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)

        records = sweep(runs, tmp_path, scheduler=local.scheduler_address, on_progress=kill_once)
    assert killed
    assert len(records) == len(runs)
    assert {record["status"] for record in records} <= {"optimal", "feasible"}
