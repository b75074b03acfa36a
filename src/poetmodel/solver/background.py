"""A solve in a process of its own: better results come while other work goes on."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from poetmodel.process import ProcessEndedError, WorkerJob, WorkerProcess
from poetmodel.result import SolveResult, Termination
from poetmodel.solver.facade import DEFAULT, solve
from poetmodel.solver.outcome import Outcome, accepted, finish
from poetmodel.solver.request import Request, SolveProgress

if TYPE_CHECKING:
    from concurrent.futures import Future

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

NICENESS: Final = 10
"""By how much the process gives way to others."""

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
        self._process: WorkerProcess | None = None
        try:
            process = WorkerProcess()
        except OSError as error:
            _LOG.warning("the solve beside other work could not be started (%s)", error)
            return
        weakref.finalize(self, process.end)
        self._process = process
        self._job = process.call(
            refine, problem, start, time_limit, gap, on_news=self._found.append
        )
        self._job.add_done_callback(partial(_ended, process))

    @property
    def runs(self) -> bool:
        """Whether it still looks for better schedules, in the process that started it."""
        return self._process is not None and os.getpid() == self._owner and not self._job.done()

    def take(self) -> SolveResult | None:
        """Return the latest result that has not been taken, if there is one."""
        if not self._found or os.getpid() != self._owner:
            return None
        return replace(self._found.popleft(), problem=self._problem)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; return whether it has."""
        if self.runs:
            concurrent.futures.wait([self._job], timeout_s)
        return not self.runs

    def close(self) -> None:
        """End it now; what it has found can still be taken."""
        if self._process is not None:
            self._process.close()


def _ended(process: WorkerProcess, job: Future[None]) -> None:
    """End the process of a job that is done, and say so if that failed."""
    process.end()
    error = job.exception()
    if error is not None and not isinstance(error, ProcessEndedError):
        _LOG.warning("the solve beside other work failed: %s", error)


# -- in the process --------------------------------------------------------------------------------


def refine(
    job: WorkerJob, problem: Problem, start: Schedule, time_limit: float, gap: float
) -> None:
    """Solve; tell each better schedule as a result on the way, and the last one."""
    with suppress(OSError, AttributeError):  # Windows has no niceness
        os.nice(NICENESS)
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
        job.tell(finish(problem, request, outcome, formulation=DEFAULT))

    job.tell(solve(problem, start=start, time_limit=time_limit, gap=gap, on_progress=watch))
