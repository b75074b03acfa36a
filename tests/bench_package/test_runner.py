"""Running a sweep: in parallel, resumed, warm, and whatever dies on the way."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import TYPE_CHECKING, Any

import pytest

from poetmodel.bench import Cell, Progress, Store, grid, sweep
from poetmodel.bench.measurement import blank
from poetmodel.bench.runner import _Run
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

METHODS = ("optimal", "lru-paging")


def _cells(*ram: str, methods: tuple[str, ...] = METHODS) -> tuple[Cell, ...]:
    return grid(["mlp"], ["rpi4b"], ram=ram or ("75%", "100%"), methods=methods)


class _Pool(Executor):
    """Answers at once, in this process; `deaths` says for which cells it breaks."""

    def __init__(self, deaths: list[str], begun: list[tuple[str, str | None]]) -> None:
        self.deaths = deaths
        self.begun = begun

    def submit(self, _: Any, fields: Any = None, start: Any = None, /, **__: Any) -> Future[Any]:
        cell = Cell.from_dict(fields)
        self.begun.append((cell.name, start and start["of"]))
        future: Future[Any] = Future()
        if cell.name in self.deaths:
            self.deaths.remove(cell.name)
            future.set_exception(BrokenExecutor("a process died"))
        else:
            result = {"problem": {"ram_budget_bytes": 1}}
            schedule = {"of": cell.ram} if cell.method == "optimal" else None
            future.set_result(
                {**blank(cell), "status": "feasible", "result": result, "schedule": schedule}
            )
        return future


def _run(
    cells: tuple[Cell, ...], folder: Path, *, deaths: list[str] | None = None, warm: bool = True
) -> tuple[list[tuple[str, str | None]], list[Progress]]:
    """Run cells in made-up pools; return what was begun, and the progress that was told."""
    begun: list[tuple[str, str | None]] = []
    told: list[Progress] = []
    run = _Run(store=Store(folder), cells=cells, warm=warm, on_progress=told.append)
    run.run(lambda: _Pool(deaths or [], begun))
    return begun, told


def test_sweep_in_real_processes(tmp_path: Path) -> None:
    """Every cell has its record, in the order of the cells; solved ones have a schedule file."""
    cells = _cells()
    records = sweep(cells, tmp_path, workers=1)
    assert [record["key"] for record in records] == [cell.key for cell in cells]
    assert {record["status"] for record in records} <= {"optimal", "feasible"}
    assert Store(tmp_path).schedule(cells[0].key) is not None
    content = (tmp_path / "cells.jsonl").read_bytes()
    assert sweep(cells, tmp_path) == records
    assert (tmp_path / "cells.jsonl").read_bytes() == content


@pytest.mark.slow
def test_killed_process_costs_nothing(tmp_path: Path) -> None:
    """A process that is killed is replaced, and the sweep ends complete."""
    cells = _cells("75%", "80%", "90%", methods=("lru-paging",))
    ends = []

    def kill_once(progress: Progress) -> None:
        if progress.done == 1 and not ends:
            for process in multiprocessing.active_children():
                ends.append(process.pid)
                os.kill(process.pid or 0, signal.SIGKILL)

    records = sweep(cells, tmp_path, workers=1, on_progress=kill_once)
    assert ends
    assert [record["status"] for record in records] == ["feasible"] * 3


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    """Cells with a record are skipped, and count as done; new ones are run."""
    _run(_cells("75%"), tmp_path)
    begun, told = _run(_cells("75%", "100%"), tmp_path)
    assert sorted(begun) == [
        ("mlp | rpi4b | 100% | lru-paging", None),
        ("mlp | rpi4b | 100% | optimal | highs", "75%"),
    ]
    assert (told[0].done, told[0].total, told[0].remaining_s) == (2, 4, None)
    assert (told[-1].done, told[-1].failed, told[-1].remaining_s) == (4, 0, 0.0)


def test_torn_cell_is_run_again(tmp_path: Path) -> None:
    """A record that was cut off while it was written is made anew, the others stay."""
    cells = _cells()
    _run(cells, tmp_path)
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    begun, _ = _run(cells, tmp_path)
    assert len(begun) == 1
    assert len(Store(tmp_path).finished()) == 4


def test_warm_starts_go_along_the_budgets(tmp_path: Path) -> None:
    """A larger budget begins with the schedule of the smaller one, unless all starts are cold."""
    cells = _cells("75%", "80%", "100%", methods=("optimal",))
    begun, _ = _run(cells, tmp_path / "warm")
    assert [start for _, start in begun] == [None, "75%", "80%"]
    assert [name.split(" | ")[2] for name, _ in begun] == ["75%", "80%", "100%"]
    begun, _ = _run(_cells("90%", methods=("optimal",)), tmp_path / "warm")
    assert [start for _, start in begun] == [None]
    begun, _ = _run(_cells("75%", "85%", "100%", methods=("optimal",)), tmp_path / "warm")
    assert [start for _, start in begun] == ["75%"]
    begun, _ = _run(cells, tmp_path / "cold", warm=False)
    assert [start for _, start in begun] == [None, None, None]


def test_cell_whose_process_dies_is_tried_twice(tmp_path: Path) -> None:
    """It is begun again in a new pool; dying twice it is recorded as failed, and run next time."""
    cells = _cells()
    name = cells[0].name
    begun, told = _run(cells, tmp_path / "once", deaths=[name])
    assert [entry[0] for entry in begun].count(name) == 2
    assert told[-1].failed == 0
    begun, told = _run(cells, tmp_path / "twice", deaths=[name, name])
    assert (told[-1].done, told[-1].failed) == (4, 1)
    assert len(Store(tmp_path / "twice").finished()) == 3
    begun, told = _run(cells, tmp_path / "twice")
    assert [entry[0] for entry in begun] == [name]
    assert (told[-1].done, told[-1].failed) == (4, 0)


def test_unreachable_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address at which nobody answers is named."""
    pytest.importorskip("distributed")
    monkeypatch.setattr("poetmodel.bench.workers.CONNECT_S", 1)
    with pytest.raises(InputError, match="cannot be reached"):
        sweep(_cells(), tmp_path, scheduler="tcp://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_cluster_survives_the_death_of_a_worker(tmp_path: Path) -> None:
    """On a real Dask cluster of two workers, one of which is killed, the sweep ends complete."""
    distributed = pytest.importorskip("distributed")
    cells = _cells("75%", "80%", "85%", "90%", "95%", "100%", methods=METHODS)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as local:
        killed: list[int] = []

        def kill_once(progress: Progress) -> None:
            if progress.done == 2 and not killed:
                process = next(iter(local.workers.values())).process
                killed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)

        records = sweep(cells, tmp_path, scheduler=local.scheduler_address, on_progress=kill_once)
    assert killed
    assert len(records) == len(cells)
    assert {record["status"] for record in records} <= {"optimal", "feasible"}
