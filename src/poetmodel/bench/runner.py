"""Run the cells of a sweep, in parallel, and keep what they give."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines.registry import method
from poetmodel.bench.measurement import FAILED, failure, measure
from poetmodel.bench.store import Store
from poetmodel.bench.workers import check_scheduler, cluster, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from poetmodel.bench.cells import Cell
    from poetmodel.bench.locks import Lock
    from poetmodel.bench.measurement import Record

POLL_S: Final = 0.2
"""How long to wait before asking again whether another sweep has let go of a cell [s]."""
TRIES: Final = 2
"""How often a cell is begun whose process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a sweep is."""

    total: int
    """Cells of the sweep."""
    done: int
    """Cells with a record, those of earlier runs included."""
    failed: int
    """Cells of this run that ended without an answer."""
    remaining_s: float | None
    """About how long the rest takes, by what was done so far [s]; None before the first."""


def sweep(
    cells: Sequence[Cell],
    folder: Path,
    *,
    workers: int = 1,
    scheduler: str | None = None,
    warm: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Record]:
    """Run the cells that have no record yet, and return the records of all.

    Parameters
    ----------
    cells : sequence of Cell
        What to solve, as `grid` gives them: budgets ascending.
    folder : Path
        Where records and schedules are kept. Cells that have a record there, of a run that was
        killed say, are not run again, unless they failed.
    workers : int
        Local processes at a time.
    scheduler : str, optional
        Address of a Dask cluster that solves the cells in place of local processes.
    warm : bool
        Whether methods that solve a program start from the schedule of the next smaller budget,
        which is valid for the larger one. Budgets of one problem then run one after the other.
    on_progress : callable, optional
        Told whenever a cell ends.

    Returns
    -------
    list of dict
        One record per cell, in the order of `cells`.

    Raises
    ------
    InputError
        If the folder cannot be used, or the cluster cannot be reached.

    Notes
    -----
    Ctrl-C, or killing the sweep, loses the cells that are under way. Where a process dies, its cell
    is begun again in a fresh one, and recorded as failed when that dies too.

    Sweeps that run in one folder at the same time share the work: a cell is solved by the sweep
    that claims it first, and claims end with their sweep.
    """
    if scheduler is not None:
        check_scheduler(scheduler)
    store = Store(folder)
    run = _Run(store=store, cells=cells, warm=warm, on_progress=on_progress)
    if run.todo:
        pools = processes(workers) if scheduler is None else cluster(scheduler)
        with pools as (make, width):
            run.run(make, width)
    records = {record["key"]: record for record in store.records()}
    return [records[cell.key] for cell in cells if cell.key in records]


@dataclass(slots=True)
class _Run:
    store: Store
    cells: Sequence[Cell]
    warm: bool
    on_progress: Callable[[Progress], None] | None
    todo: list[list[Cell]] = field(default_factory=list)
    """Cells without a record that run one after the other."""
    along: dict[Cell, list[Cell]] = field(default_factory=dict)
    """All cells along each RAM axis, budgets ascending."""
    skipped: int = 0
    done: int = 0
    failed: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    deaths: Counter[str] = field(default_factory=Counter)
    """How often a process has died when it, or its neighbour, was at a cell."""
    before: dict[str, Record] = field(default_factory=dict)
    """The records of earlier runs, by key."""
    claims: dict[str, Lock] = field(default_factory=dict)
    """The cells that this sweep may solve, by key."""

    def __post_init__(self) -> None:
        self.before = {record["key"]: record for record in self.store.records()}
        finished = self.store.finished()
        chains: dict[Cell, list[Cell]] = {}
        for cell in self.cells:
            self.along.setdefault(cell.chain, []).append(cell)
            if cell.key in finished:
                self.skipped += 1
            else:
                chains.setdefault(cell.chain if self._is_linked(cell) else cell, []).append(cell)
        self.todo = list(chains.values())

    def run(self, make: Callable[[], Executor], width: Callable[[], int]) -> None:
        """Solve all cells that no other sweep has solved; `width` is how many at a time."""
        self._tell()
        pool = make()
        running: dict[Future[Record], list[Cell]] = {}
        try:
            while self.todo or running:
                for chain in self._claimed(width() - len(running)):
                    running[self._submit(pool, chain[0])] = chain
                if not running:
                    time.sleep(POLL_S)
                    continue
                waits = POLL_S if self.todo and len(running) < width() else None
                ended, _ = wait(running, timeout=waits, return_when=FIRST_COMPLETED)
                again = [self._settle(future, running.pop(future)) for future in ended]
                if any(isinstance(future.exception(), BrokenExecutor) for future in ended):
                    again.extend(running.values())
                    running.clear()
                    pool = make()
                self.todo[:0] = [chain for chain in again if chain]
        finally:
            for claim in self.claims.values():
                claim.release()

    def _claimed(self, most: int) -> list[list[Cell]]:
        """Take chains whose first cell nobody else solves; leave out what others have solved."""
        taken: list[list[Cell]] = []
        left: list[list[Cell]] = []
        for place, chain in enumerate(self.todo):
            if len(taken) >= most:
                left.extend(self.todo[place:])
                break
            mine = False
            while chain and not mine and self._claim(chain[0]):
                mine = not self._solved_elsewhere(chain[0])
                if not mine:
                    chain = chain[1:]  # noqa: PLW2901
            if mine:
                taken.append(chain)
            elif chain:
                left.append(chain)
        self.todo = left
        return taken

    def _claim(self, cell: Cell) -> bool:
        """Return whether this sweep may solve a cell."""
        if cell.key not in self.claims:
            claim = self.store.claim(cell.key)
            if claim is not None:
                self.claims[cell.key] = claim
        return cell.key in self.claims

    def _solved_elsewhere(self, cell: Cell) -> bool:
        """Return whether another sweep has recorded a cell meanwhile, and count it then."""
        record = self.store.record(cell.key)
        if record is None or record == self.before.get(cell.key):
            return False
        self._count(cell, record)
        return True

    def _count(self, cell: Cell, record: Record) -> None:
        self.claims.pop(cell.key).release()
        self.done += 1
        self.failed += record["status"] == FAILED
        self._tell()

    def _submit(self, pool: Executor, cell: Cell) -> Future[Record]:
        try:
            return pool.submit(measure, cell.to_dict(), self._start(cell))
        except BrokenExecutor as error:  # it broke just now; the loop makes another
            future: Future[Record] = Future()
            future.set_exception(error)
            return future

    def _settle(self, future: Future[Record], chain: list[Cell]) -> list[Cell]:
        """Record the first cell of a chain; return what is left of it to run."""
        cell, error = chain[0], future.exception()
        if isinstance(error, BrokenExecutor):
            self.deaths[cell.key] += 1
            if self.deaths[cell.key] < TRIES:
                return chain
        if error is None:
            record = future.result()
        else:
            record = failure(cell, f"{type(error).__name__}: {error}")
        self.store.add(record)
        self._count(cell, record)
        return chain[1:]

    def _is_linked(self, cell: Cell) -> bool:
        return self.warm and method(cell.method).by_solver

    def _start(self, cell: Cell) -> dict[str, Any] | None:
        """Return the schedule of the largest smaller budget that has one."""
        if not self._is_linked(cell):
            return None
        axis = self.along[cell.chain]
        smaller = axis[: axis.index(cell)]
        found = (self.store.schedule(other.key) for other in reversed(smaller))
        return next((schedule for schedule in found if schedule is not None), None)

    def _tell(self) -> None:
        if self.on_progress is None:
            return
        elapsed_s = time.monotonic() - self.begun_s
        left = len(self.cells) - self.skipped - self.done
        self.on_progress(
            Progress(
                total=len(self.cells),
                done=self.skipped + self.done,
                failed=self.failed,
                remaining_s=elapsed_s / self.done * left if self.done else None,
            )
        )
