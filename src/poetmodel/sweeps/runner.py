"""Execute runs in parallel and store their records."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from poetmodel.baselines.lookup import method
from poetmodel.errors import InputError, PoetModelError, WorkersLostError
from poetmodel.process import LocalProcesses, ProcessEndedError
from poetmodel.sweeps.measurement import FAILED, Record, failure_record, measure_run
from poetmodel.sweeps.store import Claim, RecordFile, Store
from poetmodel.sweeps.workers import ShippingPool, pool_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from pathlib import Path

    from poetmodel.sweeps.runs import Run

POLL_S: Final = 0.2
"""Interval between attempts to start runs that other processes have claimed, and maximum time until
Ctrl-C is handled [s]."""
MAX_ATTEMPTS: Final = 2
"""Maximum number of attempts to execute a run whose process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a sweep."""

    total: int
    """Number of runs of the sweep."""
    done: int
    """Number of recorded runs, including those of earlier sweeps that did not fail."""
    failed: int
    """Number of runs that were recorded as failed since the sweep began, by any process."""
    remaining_s: float | None
    """Estimated time of the remaining runs [s]; None until this sweep counts a run as done."""
    last: Record | None = None
    """Record of the run that was counted last; None at the start of the sweep."""


def shard(text: str) -> slice:
    """Parse a shard ``I/N``: return the slice that selects every N-th run from the I-th on.

    Raises
    ------
    InputError
        If the text has another format, or I is not from 1 to N.

    Examples
    --------
    >>> list(range(8))[shard("2/3")]
    [1, 4, 7]
    """
    index_text, _, count_text = text.partition("/")
    try:
        first, step = int(index_text), int(count_text)
    except ValueError:
        first, step = 0, 0
    if not 1 <= first <= step:
        raise InputError(f"expected I/N with I from 1 to N, such as 1/4, got {text!r}")
    return slice(first - 1, None, step)


def sweep(
    runs: Sequence[Run],
    folder: Path,
    *,
    workers: int = 1,
    pool: Executor | None = None,
    scheduler: str | None = None,
    warm: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Record]:
    """Execute the runs without a record or with a failed one; return the records of all runs.

    Parameters
    ----------
    runs : sequence of Run
        The runs of a `grid`, budgets ascending.
    folder : Path
        Folder of records and schedules, created if it is missing. Runs with a record there, for
        example of a killed sweep, are not repeated, unless they failed.
    workers : int
        Number of concurrent runs, each in a process of this machine or in `pool`; ignored with
        `scheduler`.
    pool : concurrent.futures.Executor, optional
        Executor that replaces processes of this machine, such as one of Dask. Problems of runs, and
        files of user-defined methods, are sent to it. The pool stays open. Ignored with
        `scheduler`.
    scheduler : str, optional
        Address of a running Dask scheduler, such as ``tcp://10.0.0.1:8786``. Its workers execute
        the runs, one for each of their threads at a time, each in a process of its own. Needs the
        extra ``cluster``.
    warm : bool
        Whether methods that use a solver start from the schedule of the largest smaller budget that
        has one, which is valid for the larger budget. Their runs that differ only in the budget are
        then executed one after the other.
    on_progress : callable, optional
        Called with the `Progress` at the start and after each run; never if no run is left to
        execute.

    Returns
    -------
    list of dict
        One record per run, in the order of `runs`.

    Raises
    ------
    InputError
        If the folder cannot be used, or a file to send with a run cannot be read. With `scheduler`,
        if it cannot be reached, it has no workers, a worker lacks this version of poetmodel, or the
        extra is not installed.
    UserMethodError
        If the file of a user-defined method raises an exception when it is imported.
    OSError
        If no process of this machine can be started.
    WorkersLostError
        If `pool` or the connection to the scheduler breaks, cancels a run or accepts no more runs.
        Recorded runs stay.

    Notes
    -----
    Ctrl-C, or killing the sweep, loses the runs in progress. Without `pool`, if the process of a
    run dies, the run is started again in another process, and recorded as failed if that process
    dies, too. Errors of a run are recorded, also if a worker of `pool` has another version of
    poetmodel. Concurrent sweeps in one folder share its runs: the sweep that claims a run first
    executes it.
    """
    if scheduler is not None:
        from poetmodel.sweeps.cluster import connect

        with connect(scheduler) as (cluster, count_threads):
            return _execute_runs(runs, folder, cluster, count_threads, warm, on_progress)
    if pool is not None:
        return _execute_runs(runs, folder, ShippingPool(pool), lambda: workers, warm, on_progress)
    with LocalProcesses() as processes:
        return _execute_runs(runs, folder, processes, lambda: workers, warm, on_progress)


def _execute_runs(
    runs: Sequence[Run],
    folder: Path,
    pool: Executor,
    count_slots: Callable[[], int],
    warm: bool,  # noqa: FBT001
    on_progress: Callable[[Progress], None] | None,
) -> list[Record]:
    """Execute unfinished runs, `count_slots` at a time; return all records in order of `runs`."""
    store = Store(folder)
    queue = sweep_queue(runs, store, warm=warm, on_progress=on_progress)
    if queue.remaining_chains:
        queue.execute(pool, count_slots)
    records = {record["key"]: record for record in store.records()}
    return [records[run.key] for run in runs if run.key in records]


def sweep_queue(
    runs: Sequence[Run],
    store: Store,
    *,
    warm: bool,
    on_progress: Callable[[Progress], None] | None,
) -> RunQueue[Run]:
    """Return a queue for the unfinished runs of a sweep; parameters as in `sweep`.

    A run is unfinished if it has no record, or if its record is that of a failure.
    """
    runs_of_axis: dict[Run, list[Run]] = {}
    for run in runs:
        runs_of_axis.setdefault(run.chain, []).append(run)

    def uses_start(run: Run) -> bool:
        return warm and method(run.method).uses_solver

    def find_start(run: Run) -> dict[str, Any] | None:
        """Return the content of the schedule file of the largest smaller budget that has one."""
        axis = runs_of_axis[run.chain]
        smaller_runs = axis[: axis.index(run)] if uses_start(run) else []
        schedules = (store.load_schedule(other.key) for other in reversed(smaller_runs))
        return next((schedule for schedule in schedules if schedule is not None), None)

    return RunQueue(
        store=store,
        runs=runs,
        measure=measure_run,
        failure=lambda run, error: failure_record(run, _describe(error)),
        identity_of=lambda run: {"key": run.key, "name": run.name, "cell": run.to_dict()},
        chain_of=lambda run: run.chain if uses_start(run) else run,
        inputs_of=lambda run: (find_start(run), run.build_problem()),
        on_progress=on_progress,
    )


class Recordable(Protocol):
    """A run with a key for its records, and fields from which another process can execute it."""

    @property
    def key(self) -> Hashable:
        """Key in the records."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""


AnyRun = TypeVar("AnyRun", bound=Recordable)


@dataclass(slots=True, kw_only=True)
class RunQueue(Generic[AnyRun]):
    """A queue that executes the runs without a record or with a failed one, and stores records."""

    store: RecordFile
    """Records and claims of the runs."""
    runs: Sequence[AnyRun]
    """All runs, with and without a record."""
    measure: Callable[..., Record]
    """Executes a run in a process of the pool, from its fields and `inputs_of`; returns the
    record."""
    failure: Callable[[AnyRun, BaseException], Record]
    """Returns the record of a run that raised an exception, or whose process died."""
    identity_of: Callable[[AnyRun], Record] = lambda _: {}
    """Returns the record fields that identify a run. They replace those of a worker, which may name
    copies of files."""
    chain_of: Callable[[AnyRun], Hashable] = lambda run: run.key
    """Returns the chain of a run; runs of one chain execute one after the other."""
    inputs_of: Callable[[AnyRun], tuple[Any, ...]] = lambda _: ()
    """Returns further arguments of `measure`, such as a start schedule from the records so far."""
    on_progress: Callable[[Progress], None] | None = None
    """Callback at the beginning of `execute` and after each run."""
    max_attempts: int = MAX_ATTEMPTS
    """Maximum number of attempts to execute a run whose process dies."""
    remaining_chains: list[list[AnyRun]] = field(default_factory=list)
    """Runs to execute, grouped by chain; without the chains that this process is executing."""
    n_skipped: int = 0
    """Number of runs that had a record without failure when the queue was made."""
    n_done: int = 0
    """Number of runs that were recorded since the queue was made, by any process."""
    n_failed: int = 0
    """Number of runs of `n_done` that failed."""
    start_s: float = field(default_factory=time.monotonic)
    """Time on the monotonic clock when the queue was made [s]."""
    death_counts: Counter[Hashable] = field(default_factory=Counter)
    """Number of processes that died during each run, by the key of the run."""
    earlier_failures: dict[Hashable, Record] = field(default_factory=dict)
    """Records of failed runs, which are repeated, by key."""
    claims: dict[Hashable, Claim] = field(default_factory=dict)
    """Claims of the runs in progress in this process, by key."""

    def __post_init__(self) -> None:
        """Group unfinished runs by chain in `remaining_chains`; count finished ones in `n_skipped`.

        A chain is a list of the runs with the same `chain_of`, in the order of `runs`. Runs with a
        failed record are unfinished; stores these records by key in `earlier_failures`.
        """
        finished = self.store.finished_records()
        chains: dict[Hashable, list[AnyRun]] = {}
        for run in self.runs:
            if run.key in finished:
                self.n_skipped += 1
                continue
            chains.setdefault(self.chain_of(run), []).append(run)
            if record := self.store.find_record(run.key):
                self.earlier_failures[run.key] = record
        self.remaining_chains = list(chains.values())

    def execute(self, pool: Executor, max_runs: int | Callable[[], int]) -> None:
        """Execute the remaining runs, at most `max_runs` at a time, and store their records.

        Waits for runs that other processes claim, and executes them if they are released without a
        record. Releases all claims of this queue, also after an error, but cancels no run. Raises
        `WorkersLostError` if the pool breaks, cancels a run or accepts no more runs.
        """
        name_of_pool = pool_name(pool)
        count_slots = max_runs if callable(max_runs) else lambda: max_runs
        self._report_progress()
        running: dict[Future[Record], list[AnyRun]] = {}
        try:
            while self.remaining_chains or running:
                n_slots = count_slots() if self.remaining_chains else 0
                for chain in self._claim_chains(n_slots - len(running)):
                    run = chain[0]
                    running[self._submit(pool, run)] = chain
                if not running:
                    time.sleep(POLL_S)
                    continue
                has_free_slots = self.remaining_chains and len(running) < n_slots
                finished_futures = _poll_futures(running)
                # Ctrl-C may reach another thread, which does not end the wait of this one.
                while not (finished_futures or has_free_slots):
                    finished_futures = _poll_futures(running)
                # All other runs are recorded before `_record_result` raises for a lost run.
                ordered_futures = sorted(finished_futures, key=_is_lost)
                chains_to_repeat = [
                    self._record_result(future, running.pop(future), name_of_pool)
                    for future in ordered_futures
                ]
                self.remaining_chains[:0] = [chain for chain in chains_to_repeat if chain]
        finally:
            for claim in self.claims.values():
                claim.release()
            self.claims.clear()

    def _submit(self, pool: Executor, run: AnyRun) -> Future[Record]:
        """Submit a run to the pool; an error in its inputs is that of the run."""
        try:
            inputs = self.inputs_of(run)
        except PoetModelError as error:
            failed: Future[Record] = Future()
            failed.set_exception(error)
            return failed
        try:
            return pool.submit(self.measure, run.to_dict(), *inputs)
        except (BrokenExecutor, RuntimeError) as error:
            raise self._lost_error(error) from error

    def _lost_error(self, error: BaseException | None) -> WorkersLostError:
        """Return the exception for a lost pool; without a cause, the pool cancelled the runs."""
        reason = "the runs in progress were cancelled" if error is None else _describe(error)
        n_recorded = self.n_skipped + self.n_done
        return WorkersLostError(
            f"the workers were lost ({reason}): {n_recorded} of {len(self.runs)} runs are "
            "recorded; repeat the sweep with new workers for the remaining runs"
        )

    def _claim_chains(self, max_chains: int) -> list[list[AnyRun]]:
        """Claim the first run of each of at most `max_chains` chains, and return these chains."""
        claimed_chains: list[list[AnyRun]] = []
        other_chains: list[list[AnyRun]] = []
        for chain in self.remaining_chains:
            is_claimed = False
            while (
                len(claimed_chains) < max_chains
                and chain
                and not is_claimed
                and self._claim(chain[0])
            ):
                is_claimed = not self._count_if_recorded(chain[0])
                if not is_claimed:
                    del chain[0]
            if is_claimed:
                claimed_chains.append(chain)
            elif chain:
                other_chains.append(chain)
        self.remaining_chains = other_chains
        return claimed_chains

    def _claim(self, run: AnyRun) -> bool:
        """Claim a run, if not done before; return False while another process holds its claim."""
        if run.key not in self.claims and (claim := self.store.claim(run.key)) is not None:
            self.claims[run.key] = claim
        return run.key in self.claims

    def _count_if_recorded(self, run: AnyRun) -> bool:
        """Count a claimed run as done if it was recorded, even as failed, since the queue was made.

        Return whether the run was counted; then its claim is released, and the progress reported.
        """
        record = self.store.find_record(run.key)
        if record is None or record == self.earlier_failures.get(run.key):
            return False
        self._count(run, record)
        return True

    def _count(self, run: AnyRun, record: Record) -> None:
        """Release the claim of a run, count the run as done, and report the progress."""
        self.claims.pop(run.key).release()
        self.n_done += 1
        self.n_failed += record["status"] == FAILED
        self._report_progress(record)

    def _record_result(
        self, future: Future[Record], chain: list[AnyRun], name_of_pool: str
    ) -> list[AnyRun]:
        """Store and count the record of the first run of a chain; return the remaining runs."""
        if _is_lost(future):
            raise self._lost_error(None if future.cancelled() else future.exception())
        run, error = chain[0], future.exception()
        if isinstance(error, ProcessEndedError):
            self.death_counts[run.key] += 1
            if self.death_counts[run.key] < self.max_attempts:
                return chain
        record = future.result() if error is None else self.failure(run, error)
        record = {**record, **self.identity_of(run), "pool": name_of_pool}
        self.store.add(record)
        self._count(run, record)
        return chain[1:]

    def _report_progress(self, last: Record | None = None) -> None:
        """Call `on_progress`, if any, with the progress; `last` is the record counted last."""
        if self.on_progress is None:
            return
        elapsed_s = time.monotonic() - self.start_s
        n_remaining = len(self.runs) - self.n_skipped - self.n_done
        self.on_progress(
            Progress(
                total=len(self.runs),
                done=self.n_skipped + self.n_done,
                failed=self.n_failed,
                remaining_s=elapsed_s / self.n_done * n_remaining if self.n_done else None,
                last=last,
            )
        )


def _poll_futures(futures: Iterable[Future[Record]]) -> set[Future[Record]]:
    """Wait for the first result for at most `POLL_S`; return the finished futures, maybe none."""
    return wait(futures, timeout=POLL_S, return_when=FIRST_COMPLETED).done


def _is_lost(future: Future[Any]) -> bool:
    """Return whether a run ended because its pool broke or cancelled it; waits for its end."""
    if future.cancelled():
        return True
    error = future.exception()
    return isinstance(error, BrokenExecutor) and not isinstance(error, ProcessEndedError)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
