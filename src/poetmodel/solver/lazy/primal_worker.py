"""The primal worker: a process that searches for schedules during the proof.

Each process uses one core. The proof sends its bounds and solutions, and receives better schedules.
Each process verifies the schedules that it receives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from poetmodel.clock import infrequent_gc
from poetmodel.errors import BackendError
from poetmodel.process import ProcessEndedError, WorkerJob, WorkerProcess
from poetmodel.solver.lazy.primal import PrimalHeuristic
from poetmodel.solver.lazy.session import Session

if TYPE_CHECKING:
    from concurrent.futures import Future

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.lazy.params import LazyParams
    from poetmodel.solver.request import Request, SolveProgress

UPDATE_S: Final = 0.1
"""Interval between two updates of the worker process [s]."""
LAST_LINES: Final = 5
"""Maximum number of lines of a failed search's traceback in the error."""

_LOG: Final = logging.getLogger(__name__)


class FoundSchedule(NamedTuple):
    """A schedule that the sender's verifier accepts."""

    schedule: Schedule
    value: float
    """Value of the schedule minus the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofState:
    """Bounds and solutions of the proof."""

    bound: float
    """Best lower bound."""
    columns: int
    """Maximum number of columns of a relaxation."""
    found: FoundSchedule | None = None
    """The best schedule; None if it was already sent."""
    solution: Schedule | None = None
    """The schedule of the latest solution of a relaxation; None if it was already sent."""


class PrimalWorker:
    """The primal heuristic in a process, as seen by the proof.

    As a context manager, it starts the process some time after entry, and ends it on exit.
    Schedules that the process finds are offered to the session.

    If the process cannot be started or is killed, for example when memory is short, the solve
    continues without it and logs the event. If the search or the progress callback fails, the solve
    is stopped and `check` raises the error.
    """

    def __init__(self, session: Session) -> None:
        """Create the thread that supervises the process; both start after entering the context."""
        self.session = session
        self.is_running = threading.Event()
        """Set while the process is running."""
        self._solutions: deque[Schedule] = deque(maxlen=1)
        self._best_value = float("inf")
        """Smallest value of the schedules that both processes have."""
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._supervise, name="poetmodel-search", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def put(self, solution: Schedule) -> None:
        """Send a solution's schedule with the next update, in place of an earlier one."""
        self._solutions.append(solution)

    def check(self) -> None:
        """Raise the error of the worker thread, if there is one."""
        if self._failure is not None:
            raise self._failure

    def _supervise(self) -> None:
        """Start the process, send updates until it ends or the context exits, then end it."""
        session, params = self.session, self.session.params
        if self._closing.wait(params.worker_start_s):
            return
        try:
            process = WorkerProcess()
        except OSError as error:
            self._log_failure(f"could not be started ({error})")
            return
        try:
            left_s = max(UPDATE_S, session.request.remaining_s())
            request = replace(session.request, on_progress=None, time_limit_s=left_s)
            beginning = (session.problem, request, params, self._next_state())
            search = process.call(search_schedules, *beginning, on_progress=self._receive)
            self.is_running.set()
            self._send_updates(process, search)
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._fail(error)
        finally:
            self.is_running.clear()
            process.close()

    def _send_updates(self, process: WorkerProcess, search: Future[None]) -> None:
        """Send changed states of the proof until the search ends.

        Raise `BackendError` if the search failed.
        """
        sent_state = None
        while not search.done():
            if self._closing.wait(UPDATE_S):
                return
            if process.has_sent_all and (update := self._next_state()) != sent_state:
                process.send(update)
                sent_state = replace(update, found=None, solution=None)
        try:
            search.result()
        except ProcessEndedError as error:
            self.is_running.clear()  # before the log entry becomes visible
            if not self.session.done():
                self._log_failure(f"failed: {error}")
        except Exception as error:
            lines = "\n".join(getattr(error, "__notes__", [str(error)])).splitlines()[-LAST_LINES:]
            msg = (
                "the search for schedules failed in its process; solve with one thread, and please "
                "report this with the problem:\n" + "\n".join(lines)
            )
            raise BackendError(msg) from error

    def _next_state(self) -> ProofState:
        """Return the state of the proof; with a schedule or solution only if it was not sent."""
        session, best, new_schedule = self.session, self.session.bounds.incumbent, None
        if best is not None and best.value < self._best_value:
            self._best_value = best.value
            new_schedule = FoundSchedule(best.schedule, best.value)
        return ProofState(
            bound=session.bounds.lower,
            columns=session.columns,
            found=new_schedule,
            solution=self._solutions.popleft() if self._solutions else None,
        )

    def _receive(self, found: FoundSchedule) -> None:
        """Offer a schedule that the process found to the session."""
        self._best_value = min(self._best_value, found.value)
        try:
            self.session.offer(found.schedule)
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._fail(error)

    def _log_failure(self, event: str) -> None:
        """Write an event of the process to the solve's log and as a warning."""
        text = f"the process that searches for schedules {event}; the solve goes on without it"
        self.session.log.append(f"{text}\n")
        _LOG.warning("%s", text)

    def _fail(self, error: BaseException) -> None:
        """Store the first error for `check`, and stop the solve and the process."""
        self._failure = self._failure or error
        self._closing.set()
        self.session.stop.set()


# -- in the process --------------------------------------------------------------------------------


class PrimalSearch:
    """The primal heuristic in the worker process, which reads messages of its job.

    It sends each better schedule to the proof.
    """

    def __init__(
        self, job: WorkerJob, problem: Problem, request: Request, params: LazyParams
    ) -> None:
        """Begin a session in the worker process, which sends its better schedules."""
        self.job = job
        request = replace(request, started_s=time.monotonic(), wall_end_s=None)
        request = replace(request, on_progress=self._report)
        self.session = Session(problem, request, params=params)
        self.primal = PrimalHeuristic(self.session, has_new_solution=self._is_waited_for)
        self._solution: Schedule | None = None
        self._best_value = float("inf")

    def run(self) -> None:
        """Search until the solve ends: from each new solution, and locally in between."""
        while not self.session.done():
            if self._is_waited_for() and self._solution is not None:
                solution, self._solution = self._solution, None
                self.primal.repair(solution)
            else:
                self.primal.improve()

    def update(self, state: ProofState) -> None:
        """Update bound, columns, incumbent and next solution by a state of the proof."""
        session = self.session
        session.columns = max(session.columns, state.columns)
        session.raise_bound(state.bound)
        if state.found is not None:
            self._best_value = min(self._best_value, state.found.value)
            session.offer(state.found.schedule)
        self._solution = state.solution or self._solution

    def _is_waited_for(self) -> bool:
        """Read all messages; return whether there is a new solution from which to search."""
        for state in self.job.messages():
            self.update(state)
        return self._solution is not None

    def _report(self, _: SolveProgress) -> None:
        """Send the best schedule to the proof if the proof does not have the schedule yet."""
        best = self.session.bounds.incumbent
        if best is not None and best.value < self._best_value:
            self._best_value = best.value
            self.job.report_progress(FoundSchedule(best.schedule, best.value))


def search_schedules(
    job: WorkerJob, problem: Problem, request: Request, params: LazyParams, state: ProofState
) -> None:
    """Search for schedules in the worker process until the job ends or the gap is closed."""
    with infrequent_gc():
        search = PrimalSearch(job, problem, request, params)
        search.update(state)
        search.run()
