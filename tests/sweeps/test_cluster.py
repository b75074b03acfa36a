"""Sweeps on a Dask cluster: a scheduler and two workers, each a process of this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kit.commands import BOARD, invoke, training_step, write_graph
from poetmodel.errors import InputError
from poetmodel.sweeps import Store, grid, sweep

TIMES = {"recorded", "seconds", "cpu_s", "pool"}
SOLVE_TIMES = {"build_s", "solve_s", "primal_integral_s"}
ARGUMENTS = ("sweep", "mlp", "--devices", "rpi4b", "--ram", "75%,90%")


# -- without a cluster -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ("tcp://127.0.0.1:9", "no Dask scheduler ("),
        ("127.0.0.1:9", "no Dask scheduler ("),
        ("tcp://127.0.0.1:99999", "no Dask scheduler ("),
        ("tcp://127.0.0.1", "missing port number"),
        ("http://127.0.0.1:9", "unknown address scheme 'http'"),
        ("nonsense", "missing port number"),
        ("", "expected an address"),
    ],
)
def test_address_where_nobody_listens_is_one_sentence(scheduler, said, monkeypatch):
    """The command ends with status 2 and one line, before a folder is made."""
    monkeypatch.setattr("poetmodel.sweeps.cluster.ANSWER_S", 0.5)
    ended = invoke(*ARGUMENTS, "--out", Path("sweep"), "--scheduler", scheduler)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert said in ended.err
    assert "expected an address such as tcp://" in ended.err
    assert not Path("sweep").exists()


@pytest.mark.parametrize("banner", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"short"])
def test_server_that_is_no_scheduler_is_refused(banner, tmp_path, monkeypatch):
    """A server that is silent, or greets otherwise than Dask, is refused in time."""
    monkeypatch.setattr("poetmodel.sweeps.cluster.ANSWER_S", 0.5)
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.sendall(banner)
            if banner == b"short":
                connection.close()
            else:
                connections.append(connection)

        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(InputError, match="no Dask scheduler"):
            sweep((), tmp_path / "sweep", scheduler=f"tcp://127.0.0.1:{port}")
        thread.join()
        for connection in connections:
            connection.close()


def test_local_sweeps_load_no_dask():
    """Neither the import of the package, nor a sweep in processes of this machine, nor its help."""
    code = (
        "import sys, pathlib, tempfile, poetmodel as pm\n"
        "from poetmodel.sweeps import grid, sweep\n"
        "runs = grid(['mlp'], ['rpi4b'], ram=['90%'], methods=['checkpoint-all'])\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    assert sweep(runs, pathlib.Path(folder))\n"
        "from poetmodel.cli import sweep\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('dask', 'distributed')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- a cluster of processes ------------------------------------------------------------------------
def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Cluster:
    """A scheduler and workers, as commands start them."""

    def __init__(self, folder):
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{_free_port()}"
        self.processes = []
        port = self.address.rpartition(":")[2]
        self._start("scheduler", "--host", "127.0.0.1", "--port", port)

    def _start(self, kind, *arguments, **environment):
        command = [sys.executable, "-m", "distributed.cli.dask_" + kind, *arguments]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--no-dashboard"],
                cwd=self.folder,
                env=os.environ | environment,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def add_worker(self, threads=1, **environment):
        """Start a worker without a nanny, which would start it anew."""
        options = ("--nthreads", str(threads), "--no-nanny", "--host", "127.0.0.1")
        return self._start("worker", self.address, *options, **environment)

    def wait_for_workers(self, count):
        """Wait until so many workers are connected."""
        import distributed

        with distributed.Client(self.address, timeout=60, set_as_default=False) as client:
            if count:
                client.wait_for_workers(count, timeout=60)


@pytest.fixture
def cluster(tmp_path):
    """Yield a cluster without workers."""
    pytest.importorskip("distributed")
    folder = tmp_path / "cluster"
    folder.mkdir()
    started = Cluster(folder)
    started.wait_for_workers(0)
    yield started
    for process in reversed(started.processes):
        process.kill()
        process.wait()


def _lasting(record):
    """Return the record without times and the kind of its pool."""
    result = {key: v for key, v in (record["result"] or {}).items() if key not in SOLVE_TIMES}
    return {key: value for key, value in record.items() if key not in TIMES} | {"result": result}


def _by_key(folder):
    return {record["key"]: _lasting(record) for record in Store(folder).records()}


def _write_files(folder):
    """Write a graph, a device and a method with a module companion it; return their names."""
    write_graph(folder / "own.graph.json", training_step())
    (folder / "board.toml").write_text(BOARD)
    (folder / "companion.py").write_text("NAME = 'dtr'\n")
    (folder / "mine.py").write_text(
        "import poetmodel as pm\nfrom companion import NAME\n"
        "def mine(problem):\n"
        "    return pm.baselines.run(problem, NAME).require_schedule()\n"
    )
    return ["own.graph.json", "mlp"], ["board.toml"]


@pytest.mark.slow
def test_cluster_gives_the_records_of_a_local_sweep(cluster, tmp_path, monkeypatch):
    """Files of the client reach workers that run elsewhere; one killed with -9 loses no run."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    models, devices = _write_files(here)
    runs = grid(models, devices, ram=["95%", "100%"], methods=["optimal", "mine.py:mine"])
    workers = [cluster.add_worker(), cluster.add_worker()]
    cluster.wait_for_workers(2)
    killed = []

    def kill_once(progress):
        if progress.done == 3 and not killed:
            killed.append(workers[0])
            workers[0].kill()

    local = sweep(runs, tmp_path / "local")
    counted = []

    def follow(progress):
        counted.append((progress.done, progress.total))
        kill_once(progress)

    found = sweep(runs, tmp_path / "remote", scheduler=cluster.address, on_progress=follow)
    assert killed
    assert [_lasting(record) for record in found] == [_lasting(record) for record in local]
    assert {record["status"] for record in found} <= {"optimal", "feasible", "not-applicable"}
    assert {record["pool"] for record in found} == {"distributed.ClientExecutor"}
    assert counted == [(count, len(runs)) for count in range(len(runs) + 1)]
    lines = (tmp_path / "remote" / "cells.jsonl").read_text().splitlines()
    assert len(lines) == len(runs)
    schedules = [tmp_path / folder / "schedules" for folder in ("local", "remote")]
    names = [sorted(path.name for path in folder.iterdir()) for folder in schedules]
    assert names[0] == names[1] != []
    assert not [path for path in cluster.folder.rglob("*") if "sched" in path.name]


MEETING = """
import os
import time
from pathlib import Path

from poetmodel.schedule import checkpoint_all


def meet(problem):
    here = Path({folder!r})
    (here / str(os.getpid())).touch()
    ends_s = time.monotonic() + 60
    while len(list(here.iterdir())) < 2:
        assert time.monotonic() < ends_s, "no other run came"
        time.sleep(0.05)
    return checkpoint_all(problem.graph)
"""
"""A method that waits until another run of it has begun, in another process."""


@pytest.mark.slow
def test_worker_does_as_many_runs_as_it_has_threads(cluster, tmp_path, monkeypatch):
    """Two runs on one worker are under way at the same time, each in a process of its own."""
    monkeypatch.chdir(tmp_path)
    met = tmp_path / "met"
    met.mkdir()
    Path("meeting.py").write_text(MEETING.format(folder=str(met)))
    worker = cluster.add_worker(threads=2)
    cluster.wait_for_workers(1)
    runs = grid(["mlp"], ["rpi4b"], ram=["100%", "110%"], methods=["meeting.py:meet"])
    found = sweep(runs, tmp_path / "sweep", scheduler=cluster.address)
    assert [record["status"] for record in found] == ["optimal", "optimal"]
    pids = {int(path.name) for path in met.iterdir()}
    assert len(pids) == 2
    assert not pids & {worker.pid, os.getpid()}


@pytest.mark.slow
def test_study_runs_on_a_cluster(cluster, tmp_path):
    """Its workers find the study in the checkout; every run has a record."""
    cluster.add_worker()
    cluster.wait_for_workers(1)
    out = tmp_path / "smoke-compared.jsonl"
    command = [sys.executable, "-m", "bench", "compared", "--smoke", "--only", "rotor"]
    options = ["--scheduler", cluster.address, "--out", str(out)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*command, *options], cwd=root, capture_output=True, text=True, check=True
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) > 1
    assert {record["cell"]["method"] for record in records} == {"rotor"}
    assert {record["status"] for record in records} <= {"optimal", "feasible", "not-applicable"}
    assert f"{len(records)}/{len(records)} " in done.stderr


@pytest.mark.slow
def test_killed_client_resumes(cluster, tmp_path):
    """The same command runs only the rest, and ends with all."""
    cluster.add_worker()
    cluster.wait_for_workers(1)
    out = tmp_path / "sweep"
    arguments = ["mlp", "--devices", "rpi4b", "--ram", "75%,80%,85%,90%"]
    options = ["--methods", "lru-paging,dtr", "--scheduler", cluster.address, "--out", str(out)]
    command = [sys.executable, "-m", "poetmodel", "sweep", *arguments, *options, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        lines = out / "cells.jsonl"
        while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    before = lines.read_bytes()
    done = subprocess.run(command, capture_output=True, check=True)
    assert len(json.loads(done.stdout)["cells"]) == 8
    assert lines.read_bytes().startswith(before)
    assert lines.read_bytes().count(b"\n") == 8


@pytest.mark.slow
def test_workers_that_cannot_solve_are_named(cluster, tmp_path):
    """None at all, one without poetmodel and one with another version: each is one sentence."""
    with pytest.raises(InputError, match="no workers"):
        sweep((), tmp_path / "sweep", scheduler=cluster.address)
    for name, content in (("other", "__version__ = '0.0.7'"), ("none", "raise ImportError")):
        (tmp_path / name / "poetmodel").mkdir(parents=True)
        (tmp_path / name / "poetmodel" / "__init__.py").write_text(content + "\n")
    for name, said in (("other", "0.0.7"), ("none", "cannot be imported")):
        worker = cluster.add_worker(PYTHONPATH=str(tmp_path / name))
        cluster.wait_for_workers(1)
        ended = invoke(*ARGUMENTS, "--out", Path("sweep"), "--scheduler", cluster.address)
        assert (ended.status, ended.err.count("\n")) == (2, 1)
        assert said in ended.err
        assert not Path("sweep").exists()
        worker.terminate()
        worker.wait()
