"""A real explorer: dragged, reloaded, shared, killed and started again."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from kit.explorers import LONG, MLP, run_explorer
from kit.patience import PATIENCE_S, wait_until
from poetmodel.errors import INTERRUPTED
from poetmodel.explore.store import PointStore

SMALL = ("mlp", "--device", "mkr1000", "--workers", "1")


def workers_of(explorer):
    """Return the processes that a server has started, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:  # it has ended
                continue
            if int(parent) == explorer.process.pid:
                found[int(folder.name)] = " ".join(words)
    return found


def gone(pid):
    """Return whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything(tmp_path, asked):
    """So does SIGTERM: the exit status is 0, no process is left, and one file."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        visitor = explorer.visitor()
        visitor.listen()
        visitor.wait_for_end(visitor.request_point(visitor.open(MLP), 0.5)["id"])
        pids = list(workers_of(explorer))
        assert len(pids) >= 2
        assert explorer.end(asked) == 0
        wait_until(lambda: all(map(gone, pids)))
        store = explorer.store.name
        assert [one.name for one in tmp_path.rglob("*") if store in one.name] == [store]


@pytest.mark.parametrize(
    ("asked", "delay_s"),
    [
        pytest.param(signal.SIGTERM, 0.0),
        pytest.param(signal.SIGINT, 0.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0.5, marks=pytest.mark.seeds),
        pytest.param(signal.SIGINT, 1.0, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_it_while_it_starts(tmp_path, asked, delay_s):
    """No traceback, at any time; at the very beginning, the signal itself ends the process."""
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "poetmodel", "explore", *SMALL),
            *("--no-browser", "--port", "0", "--store", str(tmp_path / "store.sqlite")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr.readline().startswith("starting")
    time.sleep(delay_s)
    started.send_signal(asked)
    _, told = started.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in told
    assert started.returncode in (0, INTERRUPTED, -asked)


@pytest.mark.parametrize("solves", [False, True], ids=["idle", "solving"])
@pytest.mark.slow
def test_signals_while_it_ends_change_nothing(tmp_path, solves):
    """Repeated signals end the server as one does, idle or during a solve."""
    with run_explorer(tmp_path, *SMALL, errors=subprocess.PIPE) as explorer:
        if solves:
            visitor = explorer.visitor()
            visitor.listen()
            begun = visitor.request_point(visitor.open(LONG), 0.2)
            wait_until(lambda: visitor.point(begun["id"])["state"] == "solving")
        process = explorer.process
        for _ in range(20):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
        _, told = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in told
        assert process.returncode in (0, -signal.SIGTERM)  # Python itself ends last


@pytest.mark.slow
def test_server_listens_on_this_machine_alone(tmp_path):
    """At its address 127.0.0.1, and at no other one of the machine."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        socket.create_connection(("127.0.0.1", explorer.port), timeout=PATIENCE_S).close()
        others = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None)}
        for other in {*others, "127.0.0.2", "::1"} - {"127.0.0.1"}:
            with pytest.raises(OSError):  # noqa: PT011 - refused, or not there
                socket.create_connection((other, explorer.port), timeout=1.0)


@pytest.mark.slow
def test_killed_server_loses_nothing(tmp_path):
    """Known results come at once from the store, and a running solve continues from there."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        visitor = explorer.visitor()
        known = visitor.wait_for_end(visitor.request_point(visitor.open(MLP), 0.5)["id"])
        drawn = visitor.answer(known["id"])
        visitor.listen()
        problem = visitor.open(LONG)
        begun = visitor.request_point(problem, 0.2)
        found = wait_until(lambda: one if (one := visitor.point(begun["id"]))["bound"] else None)
        wait_until(lambda: stored(explorer.store, begun["id"]))
        pids = list(workers_of(explorer))
        explorer.end(signal.SIGKILL)
        wait_until(lambda: all(map(gone, pids)))
        explorer.start()
        again = explorer.visitor()
        (listed,) = again.open(MLP)["points"]
        assert known == listed
        assert again.request_point(again.open(MLP), 0.5) == known
        assert again.answer(known["id"]) == drawn
        again.listen()
        left = next(one for one in again.open(LONG)["points"] if one["id"] == begun["id"])
        assert left["state"] == "cancelled"
        resumed = again.request_point(problem, 0.2)
        assert resumed["state"] == "waiting"
        assert resumed["value"] <= found["value"]
        assert resumed["bound"] > 0
        wait_until(lambda: again.point(begun["id"])["state"] == "solving")
        assert again.point(begun["id"])["value"] <= found["value"]


def stored(store, point):
    """Return whether a point is in the store with a schedule and a bound."""
    with closing(sqlite3.connect(store)) as connection:
        query = "SELECT 1 FROM points WHERE id = ? AND value IS NOT NULL AND bound > 0"
        return connection.execute(query, (point,)).fetchone() is not None


@pytest.mark.slow
def test_drag_cancels_what_nobody_wants(tmp_path):
    """Of all slider positions, only the last one is solved; earlier results are kept."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        visitor = explorer.visitor()
        visitor.listen()
        problem = visitor.open(LONG)
        stops = [visitor.request_point(problem, share)["id"] for share in (0.5, 0.4, 0.3, 0.2)]
        wait_until(lambda: visitor.point(stops[-1])["state"] == "solving")
        assert [visitor.point(stop)["state"] for stop in stops[:-1]] == ["cancelled"] * 3
        told = wait_until(lambda: [one for kind, one in visitor.events if kind == "point"])
        assert all(one["id"] in stops for one in told)
        assert visitor.wait_for_schedule(stops[-1])["energy_j"] > 0


@pytest.mark.slow
def test_two_sessions_share_a_solve(tmp_path):
    """A shared solve runs until no session requests it, and both are notified."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        one, two = explorer.visitor("one"), explorer.visitor("two")
        for visitor in (one, two):
            visitor.listen()
        problem = one.open(LONG)
        point = one.request_point(problem, 0.2)["id"]
        assert two.request_point(two.open(LONG), 0.2)["id"] == point
        for visitor in (one, two):
            wait_until(lambda heard=visitor.events: any(p["bound"] for kind, p in heard))
        one.request_point(problem, 0.9)
        assert two.point(point)["state"] == "solving"
        two.request_point(problem, 0.9)
        assert two.point(point)["state"] == "cancelled"


@pytest.mark.slow
def test_wish_of_a_closed_page_lapses(tmp_path):
    """A closed page's request expires, and its solve ends."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        visitor = explorer.visitor()
        visitor.listen()
        point = visitor.request_point(visitor.open(LONG), 0.2)["id"]
        wait_until(lambda: visitor.point(point)["state"] == "solving")
        visitor.close()
        other = explorer.visitor("other")
        assert wait_until(lambda: other.point(point)["state"] == "cancelled")


@pytest.mark.slow
def test_worker_that_dies_is_replaced(tmp_path):
    """The point fails with a sentence, and the next request is solved."""
    with run_explorer(tmp_path, *SMALL) as explorer:
        visitor = explorer.visitor()
        visitor.listen()
        problem = visitor.open(LONG)
        point = visitor.request_point(problem, 0.2)["id"]
        wait_until(lambda: visitor.point(point)["state"] == "solving")
        for pid in workers_of(explorer):
            os.kill(pid, signal.SIGKILL)
        failed = visitor.wait_for_end(point)
        assert failed["state"] == "failed"
        assert "ended unexpectedly" in failed["reason"]
        assert (
            visitor.wait_for_end(visitor.request_point(visitor.open(MLP), 0.4)["id"])["status"]
            == "optimal"
        )
        assert visitor.request_point(problem, 0.2)["state"] == "waiting"
        wait_until(lambda: visitor.point(point)["state"] == "solving")


@pytest.mark.slow
def test_two_servers_share_a_store(tmp_path):
    """Each server reads the other's results, and the file stays valid."""
    with run_explorer(tmp_path, *SMALL) as first, run_explorer(tmp_path, *SMALL) as second:
        one, two = first.visitor(), second.visitor()
        problem = one.open(MLP)
        two.open(MLP)
        for place in range(8):
            here, there = (one, two) if place % 2 else (two, one)
            point = here.wait_for_end(here.request_point(problem, place / 8)["id"])
            assert there.request_point(problem, place / 8) == point
        first.end(signal.SIGKILL)
        second.end(signal.SIGKILL)
    with closing(sqlite3.connect(first.store)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    store = PointStore(first.store)
    assert len(store.call_and_wait(store.load_points, problem["problem"])) == 8
    store.close()
