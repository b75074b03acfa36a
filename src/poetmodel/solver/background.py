"""A solve in a process of its own: better results come while other work goes on."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
import threading
import traceback
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Final, cast

from poetmodel.result import SolveResult, Termination
from poetmodel.solver.facade import DEFAULT, solve
from poetmodel.solver.lazy.primal_worker import start_python
from poetmodel.solver.outcome import Outcome, accepted, finish
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    import subprocess
    from typing import NoReturn

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import SolveProgress

NICENESS: Final = 10
"""By how much the process gives way to others."""
PROGRAM: Final = """\
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from poetmodel.solver.background import serve
serve()
"""
"""What the process runs: modules are found where the other one finds them."""

_LOG: Final = logging.getLogger(__name__)


class BackgroundSolve:
    """`solve` in a process of its own, from a schedule that is known.

    The process ends with the solve, with `close`, with the object, and with the process that
    started it. A fork of that one has no part in it. If it cannot be started, or fails, that is
    logged, and no more results come.

    Parameters
    ----------
    problem, start, time_limit, gap
        As for `solve`.
    """

    def __init__(self, problem: Problem, *, start: Schedule, time_limit: float, gap: float) -> None:
        self._problem = problem
        self._found: deque[SolveResult] = deque(maxlen=1)
        self._owner = os.getpid()
        self._ended = threading.Event()
        self._finalizer = None
        job = {"time_limit": time_limit, "gap": gap, "start": start}
        errors = None
        try:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the thread
            process = start_python(PROGRAM, errors)
        except OSError as error:
            if errors is not None:
                errors.close()
            _LOG.warning("the solve beside other work could not be started (%s)", error)
            self._ended.set()
            return
        self._finalizer = weakref.finalize(self, _end, process, self._owner)
        self._thread = threading.Thread(
            target=_attend,
            args=(process, errors, (problem, job), self._found, self._ended),
            name="poetmodel-refining",
            daemon=True,
        )
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether it still looks for better schedules, in the process that started it."""
        return os.getpid() == self._owner and not self._ended.is_set()

    def take(self) -> SolveResult | None:
        """Return the latest result that has not been taken, if there is one."""
        if not self._found or os.getpid() != self._owner:
            return None
        return replace(self._found.popleft(), problem=self._problem)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; return whether it has."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """End it now; what it has found can still be taken."""
        if self._finalizer is not None and os.getpid() == self._owner:
            self._finalizer()
            self._thread.join()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, which belongs to the one that started it."""
    if os.getpid() == owner:
        process.kill()


def _attend(
    process: subprocess.Popen[bytes],
    errors: IO[bytes],
    job: tuple[Problem, dict[str, Any]],
    found: deque[SolveResult],
    ended: threading.Event,
) -> None:
    """Give the process its work, take what it finds until it ends, and clean up."""
    into, out = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        with suppress(OSError):  # it has ended
            into.write(pickle.dumps(sys.path) + pickle.dumps(job))
            into.flush()
        with suppress(EOFError, pickle.UnpicklingError):  # it has ended, perhaps in a word
            while True:
                found.append(pickle.load(out))  # noqa: S301 - from the process started here
    finally:
        process.kill()
        status = process.wait()
        errors.seek(0)
        told = errors.read().decode(errors="replace").strip()
        for stream in (into, out, errors):
            with suppress(OSError):
                stream.close()
        if status == 1:
            _LOG.warning("the solve beside other work failed: %s", told.rpartition("\n")[2])
        ended.set()


# -- in the process ----------------------------------------------------------------------------


def serve() -> NoReturn:
    """Solve what comes for the process that started this one; end when that is gone."""
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what solvers print is no result
    with suppress(OSError):
        os.nice(NICENESS)
    status = 1
    try:
        problem, job = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the other process
        threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
        _send(_solved(problem, target, **job), target)
        status = 0
    except BaseException:  # noqa: BLE001 - the other process reads it
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _solved(
    problem: Problem, target: IO[bytes], *, start: Schedule, time_limit: float, gap: float
) -> SolveResult:
    """Solve; send each better schedule as a result on the way, and return the last one."""
    known = accepted(problem, start)
    best = [float("inf") if known is None else known.value]
    request = Request(time_limit_s=time_limit, gap=gap)

    def watch(progress: SolveProgress) -> None:
        if progress.schedule is None:
            return
        candidate = accepted(problem, progress.schedule)
        if candidate is None or candidate.value >= best[0]:
            return
        best[0] = candidate.value
        outcome = Outcome(
            termination=Termination.INTERRUPTED,
            candidate=candidate,
            bound=progress.bound or 0.0,
        )
        _send(finish(problem, request, outcome, formulation=DEFAULT), target)

    return solve(problem, start=start, time_limit=time_limit, gap=gap, on_progress=watch)


def _send(result: SolveResult, target: IO[bytes]) -> None:
    pickle.dump(result, target)
    target.flush()


def _end_with(source: IO[bytes]) -> None:
    """End this process when the one that started it is gone."""
    source.read()
    os._exit(0)
