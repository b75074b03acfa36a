"""The primal worker: a process that searches for schedules during the proof.

Each process uses one core. The proof sends its bounds, solutions and schedules, and receives better
schedules. Each process verifies the schedules that it receives.
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
from poetmodel.solver.search import Search

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from poetmodel.heuristics.restorations import Restoration
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import Request

UPDATE_INTERVAL_S: Final = 0.1
"""Interval between two updates of the worker process [s]."""
MAX_TRACEBACK_LINES: Final = 5
"""Maximum number of lines in the error from the traceback of a failed search."""

_LOG: Final = logging.getLogger(__name__)


class FoundSchedule(NamedTuple):
    """A schedule that the verifier of the sending process accepted."""

    schedule: Schedule
    value: float
    """Value of the schedule minus the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofState:
    """Bound, schedule and solution that the proof sends to the worker process."""

    bound: float
    """Best lower bound, without the baseline."""
    max_columns: int
    """Maximum number of columns of a solved model, linear or integer."""
    found_schedule: FoundSchedule | None = None
    """The incumbent; None without one, or if the process has one that is at least as good."""
    solution: Sequence[Restoration] | None = None
    """The restorations of the latest solution of a relaxation; None without one, or if it was
    already sent."""


class PrimalWorker:
    """The proof's side of the worker process, which executes the primal heuristic.

    A context manager: it starts the process `worker_start_s` after entry, and ends it on exit. The
    solve continues without a process that cannot be started or is killed. Errors of the search or
    of the progress callback stop the solve, and `raise_error` raises them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.running_event = threading.Event()
        """Set while the process searches."""
        self._solutions: deque[Sequence[Restoration]] = deque(maxlen=1)
        self._best_value = float("inf")
        """Smallest value of a schedule that was sent to or received from the process."""
        self._error: BaseException | None = None
        self._close_event = threading.Event()
        self._thread = threading.Thread(
            target=self._supervise, name="poetmodel-search", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_event.set()
        self._thread.join()

    def send_solution(self, solution: Sequence[Restoration]) -> None:
        """Send a solution with the next update, in place of an unsent earlier one."""
        self._solutions.append(solution)

    def raise_error(self) -> None:
        """Raise the first stored error of the search or the progress callback, if there is one."""
        if self._error is not None:
            raise self._error

    def _supervise(self) -> None:
        """Start the process, send updates until search or context ends, then end the process."""
        session = self.session
        if self._close_event.wait(session.policy.worker_start_s):
            return
        try:
            process = WorkerProcess()
        except OSError as error:
            self._log_event(f"could not be started ({error})")
            return
        try:
            remaining_s = max(UPDATE_INTERVAL_S, session.search.request.remaining_s())
            request = replace(session.search.request, on_progress=None, time_limit_s=remaining_s)
            arguments = (session.search.problem, request, self._next_state())
            search_future = process.call(search_schedules, *arguments, on_progress=self._receive)
            self.running_event.set()
            self._send_updates(process, search_future)
        except BaseException as error:  # noqa: BLE001 - raised by `raise_error`
            self._store_error(error)
        finally:
            self.running_event.clear()
            process.close()

    def _send_updates(self, process: WorkerProcess, search_future: Future[None]) -> None:
        """Send changed states of the proof until the search ends or the context exits."""
        sent_state = None
        while not search_future.done():
            if self._close_event.wait(UPDATE_INTERVAL_S):
                return
            if process.has_sent_all and (new_state := self._next_state()) != sent_state:
                process.send(new_state)
                sent_state = replace(new_state, found_schedule=None, solution=None)
        try:
            search_future.result()
        except ProcessEndedError as error:
            self.running_event.clear()  # before the log entry becomes visible
            if not self.session.search.is_done():
                self._log_event(f"failed: {error}")
        except Exception as error:
            lines = "\n".join(getattr(error, "__notes__", [str(error)])).splitlines()[
                -MAX_TRACEBACK_LINES:
            ]
            msg = (
                "the search for schedules failed in its process; solve with one thread, and please "
                "report this with the problem:\n" + "\n".join(lines)
            )
            raise BackendError(msg) from error

    def _next_state(self) -> ProofState:
        """Return the state of the proof; marks its incumbent and solution as sent."""
        session, incumbent, new_schedule = self.session, self.session.search.best, None
        if incumbent is not None and incumbent.value < self._best_value:
            self._best_value = incumbent.value
            new_schedule = FoundSchedule(incumbent.schedule, incumbent.value)
        return ProofState(
            bound=session.search.bound,
            max_columns=session.max_columns,
            found_schedule=new_schedule,
            solution=self._solutions.popleft() if self._solutions else None,
        )

    def _receive(self, found: FoundSchedule) -> None:
        """Offer a schedule of the process to the search; store an error for `raise_error`."""
        self._best_value = min(self._best_value, found.value)
        try:
            self.session.search.offer(found.schedule)
        except BaseException as error:  # noqa: BLE001 - raised by `raise_error`
            self._store_error(error)

    def _log_event(self, event: str) -> None:
        """Write an event of the process to the solve's log, and log it as a warning."""
        text = f"the process that searches for schedules {event}; the solve goes on without it"
        self.session.search.log.append(f"{text}\n")
        _LOG.warning("%s", text)

    def _store_error(self, error: BaseException) -> None:
        """Store the first error for `raise_error`, and stop the solve and the process."""
        self._error = self._error or error
        self._close_event.set()
        self.session.search.stop_event.set()


# -- in the process --------------------------------------------------------------------------------


class PrimalSearch:
    """The search in the worker process; its time limit counts from construction, as wall time."""

    def __init__(self, job: WorkerJob, problem: Problem, request: Request) -> None:
        self.job = job
        request = replace(request, started_s=time.monotonic(), wall_end_s=None)
        self.session = Session(Search(problem=problem, request=request, forward=self._report))
        self.primal = PrimalHeuristic(self.session, should_stop=self._has_new_solution)
        self._solution: Sequence[Restoration] | None = None
        self._best_value = float("inf")

    def search_until_done(self) -> None:
        """Repair the latest new solution, otherwise search locally, until the search is done."""
        while not self.session.search.is_done():
            if self._has_new_solution() and self._solution is not None:
                solution, self._solution = self._solution, None
                self.primal.repair(solution)
            elif "local_search" in self.session.policy.heuristics:
                self.primal.improve()
            else:
                self.session.search.stop_event.wait(UPDATE_INTERVAL_S)

    def update(self, state: ProofState) -> None:
        """Take over bound, schedule, solution and maximum columns of a state of the proof.

        The schedule counts as received, so that `_report` sends only better ones.
        """
        session = self.session
        session.max_columns = max(session.max_columns, state.max_columns)
        session.search.replace_bound(state.bound)
        if state.found_schedule is not None:
            self._best_value = min(self._best_value, state.found_schedule.value)
            session.search.offer(state.found_schedule.schedule)
        self._solution = self._solution if state.solution is None else state.solution

    def _has_new_solution(self) -> bool:
        """Update from all messages; return whether there is a new solution to search from."""
        for state in self.job.messages():
            self.update(state)
        return self._solution is not None

    def _report(self, *_: object) -> bool:
        """Send the incumbent to the proof if it is better than all schedules sent or received."""
        incumbent = self.session.search.best
        if incumbent is not None and incumbent.value < self._best_value:
            self._best_value = incumbent.value
            self.job.report_progress(FoundSchedule(incumbent.schedule, incumbent.value))
        return True


def search_schedules(job: WorkerJob, problem: Problem, request: Request, state: ProofState) -> None:
    """Search for schedules in the worker process, from `state`, until its own search is done."""
    with infrequent_gc():
        search = PrimalSearch(job, problem, request)
        search.update(state)
        search.search_until_done()
