"""What all measurements of this folder share: records, and runs in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from poetmodel.bench.measurement import FAILED, circumstances
from poetmodel.bench.runner import Progress, Recordable, RunQueue
from poetmodel.bench.store import RecordFile
from poetmodel.result import Termination

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from poetmodel.bench.measurement import Record

CORE_SHARE: Final = 0.8
"""A run that met its limit with less than this share of it in processor time is repeated."""
ATTEMPTS: Final = 6
"""How often a run is made until it had its processor time."""
_POLL_S: Final = 0.5
"""How often a process that is waited for is held against its limit [s]."""


def record(kind: str, name: str, **facts: Any) -> Record:
    """Return the record of a measurement, with when, where and under which load it was made."""
    return {**circumstances(kind, name), "load_average": os.getloadavg()[0], **facts}


def recorded(path: Path) -> RecordFile:
    """Return a file in which records of runs are found by all that the runs say of themselves."""
    return RecordFile(path, lambda record: run_key(record["cell"]))


def latest(path: Path) -> RecordFile:
    """Return a file in which the last record of each kind and name counts."""
    return RecordFile(path, lambda record: (record["kind"], record["name"]))


def run_key(fields: dict[str, Any]) -> str:
    """Return what identifies a run in a file of records: all of its fields."""
    return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run, which is known in a file of records by all of its fields."""

    @property
    def key(self) -> str:
        """What identifies it in the records."""
        return run_key(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return its fields."""
        return asdict(self)


# -- processes -------------------------------------------------------------------------------------


class ProcessEndedError(Exception):
    """A process ended without an answer, after some seconds."""

    def __init__(self, exit_code: int | None, seconds: float) -> None:
        super().__init__(f"the process ended with {exit_code} after {seconds:.0f} s")
        self.seconds = seconds


class FreshProcesses(Executor):
    """Does each run in a process of its own, forked from one that has loaded the libraries.

    A process is ended when its run takes `grace_s` longer than its limit [s].
    """

    def __init__(self, count: int, *, preloaded: Sequence[str], grace_s: float) -> None:
        self._grace_s = grace_s
        self._threads = ThreadPoolExecutor(count)
        self._stopped = threading.Event()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))

    def submit(self, measure: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function with the fields of a run, which have its limit, and its start."""
        return self._threads.submit(self._alone, measure, *arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as its base class has it
        """End: runs that are under way are dropped."""
        self._stopped.set()
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def _alone(self, measure: Any, fields: dict[str, Any], start: Any) -> Record:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_answer, args=(sender, measure, fields, start), daemon=True
        )
        begun_s = time.monotonic()
        process.start()
        sender.close()
        try:
            while not receiver.poll(_POLL_S):
                late = time.monotonic() - begun_s > fields["limit_s"] + self._grace_s
                if late or self._stopped.is_set():
                    break
            else:
                return dict(receiver.recv())
        except EOFError:
            pass
        finally:
            process.kill()
            process.join()
            receiver.close()
        raise ProcessEndedError(process.exitcode, time.monotonic() - begun_s)


class ThisProcess(Executor):
    """Does one run after the other in this process: for methods that have no solver to load."""

    def submit(self, measure: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function at once; what it raises comes out of the future."""
        done: Future[Any] = Future()
        try:
            done.set_result(measure(*arguments))
        except Exception as error:  # noqa: BLE001 - as an executor has it
            done.set_exception(error)
        return done


def _answer(out: Connection, measure: Callable[..., Record], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process itself
    out.send(measure(*arguments))
    out.close()


# -- limits in processor time ----------------------------------------------------------------------


def within_core(
    limit_s: float, measure: Callable[[float], Record], *, share: float = 1.0
) -> Record:
    """Return the facts of a run that had so much processor time, if it met its limit.

    Limits of the package are wall time. A run that met its limit is repeated with another one until
    its processor time is the limit within `CORE_SHARE`; only the last run counts. `share` is what
    part of a core it may expect.
    """
    facts: Record = {}
    for attempt in range(1, ATTEMPTS + 1):
        begun, begun_cpu_s = time.perf_counter(), time.process_time()
        facts = measure(limit_s / share)
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu_s
        facts = facts | {"seconds": seconds, "cpu_s": cpu_s, "attempts": attempt}
        met = facts.get("termination") == Termination.TIME_LIMIT
        if not met or CORE_SHARE <= cpu_s / limit_s <= 1 / CORE_SHARE:
            return facts
        share *= cpu_s / limit_s
    return facts | {"status": FAILED, "reason": f"the processor was busy in {ATTEMPTS} attempts"}


def core_share_of(work: Callable[[], object]) -> float:
    """Do some work; return which share of a core it had, a tenth or more."""
    begun, cpu_s = time.perf_counter(), time.process_time()
    work()
    share = (time.process_time() - cpu_s) / (time.perf_counter() - begun)
    return min(1.0, max(0.1, share))


# -- runs ------------------------------------------------------------------------------------------


class NamedRun(Recordable, Protocol):
    """A run with a name, and with ``limit_s`` among its fields."""

    @property
    def name(self) -> str:
        """What it is called in the records."""


AnyRun = TypeVar("AnyRun", bound=NamedRun)


def parsed(
    parser: argparse.ArgumentParser, ending: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the options of a command, and ``--out``: the file of records, of such an ending.

    Ends with a message where new records would be mixed with earlier ones.
    """
    parser.add_argument("--out", type=Path, required=True, help=f"file of records, *-{ending}")
    parser.add_argument("--resume", action="store_true", help="go on with a file that exists")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.resume:
        parser.error(f"--out: {options.out} exists; --resume goes on with it")
    return options


def run_all(
    runs: Sequence[AnyRun],
    store: RecordFile,
    measure: Callable[[dict[str, Any], Any], Record],
    pool: Executor,
    *,
    kind: str,
    workers: int = 1,
    start_of: Callable[[AnyRun], Any] = lambda _: None,
) -> int:
    """Do the runs that have no record, in their order; return 130 where that was interrupted, or 0.

    `measure` gets the fields of a run and its start, and returns its record; it runs in the pool.
    """

    def failure(run: AnyRun, error: BaseException) -> Record:
        if not isinstance(error, ProcessEndedError):
            raise error
        facts = {"seconds": error.seconds, "status": FAILED, "reason": str(error)}
        return record(kind, run.name, cell=run.to_dict(), workers=workers, **facts)

    queue = RunQueue(
        store=store,
        runs=runs,
        measure=measure,
        failure=failure,
        start_of=start_of,
        on_progress=_show,
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pool:
            queue.run(pool, lambda: workers)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; --resume goes on\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _show(progress: Progress) -> None:
    if progress.last is None:
        return
    name, seconds, status = (progress.last[key] for key in ("name", "seconds", "status"))
    gap = progress.last.get("gap")
    shown = status if gap is None else f"{status}, gap {gap:.3%}"
    sys.stderr.write(f"{progress.done}/{progress.total} {name}: {seconds:.2f} s, {shown}\n")
