"""Do runs in parallel, and keep what they give."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from poetmodel.baselines.lookup import method
from poetmodel.bench.measurement import FAILED, Record, failure, measure
from poetmodel.bench.store import RecordFile, Store
from poetmodel.bench.workers import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from poetmodel.bench.runs import Run

TRIES: Final = 2
"""How often a run is begun whose process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a sweep is."""

    total: int
    """Runs of the sweep."""
    done: int
    """Runs with a record, those of earlier sweeps included."""
    failed: int
    """Runs of this sweep that ended without an answer."""
    remaining_s: float | None
    """About how long the rest takes, by what was done so far [s]; None before the first."""
    last: Record | None = None
    """The record that has just come; None before the first."""


def sweep(
    runs: Sequence[Run],
    folder: Path,
    *,
    workers: int = 1,
    warm: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Record]:
    """Do the runs that have no record yet, and return the records of all.

    Parameters
    ----------
    runs : sequence of Run
        What to solve, as `grid` gives them: budgets ascending.
    folder : Path
        Where records and schedules are kept. Runs that have a record there, of a sweep that was
        killed say, are not repeated, unless they failed.
    workers : int
        Local processes at a time.
    warm : bool
        Whether methods that solve a program start from the schedule of the next smaller budget,
        which is valid for the larger one. Budgets of one problem then run one after the other.
    on_progress : callable, optional
        Told whenever a run ends.

    Returns
    -------
    list of dict
        One record per run, in the order of `runs`.

    Raises
    ------
    InputError
        If the folder cannot be used.

    Notes
    -----
    Ctrl-C, or killing the sweep, loses the runs that are under way. Where a process dies, its run
    is begun again in a fresh one, and recorded as failed when that dies too.
    """
    store = Store(folder)
    queue = sweep_queue(runs, store, warm=warm, on_progress=on_progress)
    if queue.todo:
        with LocalProcesses() as pool:
            queue.run(pool, workers)
    records = {record["key"]: record for record in store.records()}
    return [records[run.key] for run in runs if run.key in records]


def sweep_queue(
    runs: Sequence[Run],
    store: Store,
    *,
    warm: bool,
    on_progress: Callable[[Progress], None] | None,
) -> RunQueue[Run]:
    """Return the function that does the runs of a sweep, see `sweep`."""
    along: dict[Run, list[Run]] = {}
    for run in runs:
        along.setdefault(run.chain, []).append(run)

    def is_linked(run: Run) -> bool:
        return warm and method(run.method).by_solver

    def start(run: Run) -> dict[str, Any] | None:
        """Return the schedule of the largest smaller budget that has one."""
        axis = along[run.chain]
        smaller = axis[: axis.index(run)] if is_linked(run) else []
        schedules = (store.schedule(other.key) for other in reversed(smaller))
        return next((schedule for schedule in schedules if schedule is not None), None)

    return RunQueue(
        store=store,
        runs=runs,
        measure=measure,
        failure=lambda run, error: failure(run, f"{type(error).__name__}: {error}"),
        chain_of=lambda run: run.chain if is_linked(run) else run,
        start_of=start,
        on_progress=on_progress,
    )


class Recordable(Protocol):
    """A run that can say what its record says of it."""

    @property
    def key(self) -> Hashable:
        """Key in the records."""

    def to_dict(self) -> dict[str, Any]:
        """Return its fields as plain values."""


AnyRun = TypeVar("AnyRun", bound=Recordable)


@dataclass(slots=True, kw_only=True)
class RunQueue(Generic[AnyRun]):
    """Does the runs that have no record yet."""

    store: RecordFile
    runs: Sequence[AnyRun]
    measure: Callable[[dict[str, Any], Any], Record]
    """Does a run in a process of the pool, given its fields and its start; returns the record."""
    failure: Callable[[AnyRun, BaseException], Record]
    """Returns the record of a run that gave none but raised."""
    chain_of: Callable[[AnyRun], Hashable] = lambda run: run.key
    """Runs with the same chain are done one after the other."""
    start_of: Callable[[AnyRun], Any] = lambda _: None
    """Returns what a run begins with, by what is on record."""
    on_progress: Callable[[Progress], None] | None = None
    """Told at the beginning, and whenever a run ends."""
    todo: list[list[AnyRun]] = field(default_factory=list)
    """Runs without a record, those of a chain together."""
    skipped: int = 0
    done: int = 0
    failed: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    deaths: Counter[Hashable] = field(default_factory=Counter)
    """How often a process has died at a run."""

    def __post_init__(self) -> None:
        finished = self.store.finished()
        chains: dict[Hashable, list[AnyRun]] = {}
        for run in self.runs:
            if run.key in finished:
                self.skipped += 1
                continue
            chains.setdefault(self.chain_of(run), []).append(run)
        self.todo = list(chains.values())

    def run(self, pool: Executor, width: int) -> None:
        """Do all runs; `width` is how many at a time."""
        self._tell()
        running: dict[Future[Record], list[AnyRun]] = {}
        while self.todo or running:
            while self.todo and len(running) < width:
                chain = self.todo.pop(0)
                run = chain[0]
                running[pool.submit(self.measure, run.to_dict(), self.start_of(run))] = chain
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            again = [self._settle(future, running.pop(future)) for future in ended]
            self.todo[:0] = [chain for chain in again if chain]

    def _settle(self, future: Future[Record], chain: list[AnyRun]) -> list[AnyRun]:
        """Record the first run of a chain; return what is left of it to run."""
        run, error = chain[0], future.exception()
        if isinstance(error, BrokenExecutor):
            self.deaths[run.key] += 1
            if self.deaths[run.key] < TRIES:
                return chain
        record = future.result() if error is None else self.failure(run, error)
        self.store.add(record)
        self.done += 1
        self.failed += record["status"] == FAILED
        self._tell(record)
        return chain[1:]

    def _tell(self, last: Record | None = None) -> None:
        if self.on_progress is None:
            return
        elapsed_s = time.monotonic() - self.begun_s
        left = len(self.runs) - self.skipped - self.done
        self.on_progress(
            Progress(
                total=len(self.runs),
                done=self.skipped + self.done,
                failed=self.failed,
                remaining_s=elapsed_s / self.done * left if self.done else None,
                last=last,
            )
        )
