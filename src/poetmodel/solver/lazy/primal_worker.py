"""The primal worker: a process that searches for schedules, beside the proof.

Each has a core of its own. What the proof learns goes one way, better schedules come the other.
Each side has a verifier of its own for what the other side sends.
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
"""How often the process gets what is new [s]."""
LAST_LINES: Final = 5
"""How much of the traceback of a search that failed is reported."""

_LOG: Final = logging.getLogger(__name__)


class FoundSchedule(NamedTuple):
    """A schedule that the sender's verifier accepts."""

    schedule: Schedule
    value: float
    """Its value beyond what every schedule pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofState:
    """Bounds and rows of the proof."""

    bound: float
    """Best lower bound."""
    columns: int
    """Most columns of a relaxation."""
    found: FoundSchedule | None = None
    """The best schedule, unless already sent to the search."""
    answer: Schedule | None = None
    """The latest answer of a relaxation, if the search has not had it."""


class PrimalWorker:
    """The primal heuristic in a process of its own, as the proof sees it.

    A context: some time after it is entered the process is started, and when it is left the process
    is no more. Schedules that the process finds are offered to the session.

    If the process cannot be started, or is ended from outside (where memory is short, say), that
    goes into the solve's log, and the solve goes on without it. If its search fails, or the
    solve's watcher does, the solve is stopped and `check` raises.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.runs = threading.Event()
        """Set while there is such a process."""
        self._answers: deque[Schedule] = deque(maxlen=1)
        self._known = float("inf")
        """Least value of the schedules that both sides know."""
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="poetmodel-search", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def put(self, answer: Schedule) -> None:
        """Let the process search from this answer, and no longer from one before it."""
        self._answers.append(answer)

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _attend(self) -> None:
        """Start the process, tell it what is new until it has ended or shall end, and end it."""
        session, params = self.session, self.session.params
        if self._closing.wait(params.worker_start_s):
            return
        try:
            process = WorkerProcess()
        except OSError as error:
            self._note(f"could not be started ({error})")
            return
        try:
            left_s = max(UPDATE_S, session.request.remaining_s())
            request = replace(session.request, on_progress=None, time_limit_s=left_s)
            beginning = (session.problem, request, params, self._update())
            search = process.call(search_schedules, *beginning, on_progress=self._hear)
            self.runs.set()
            self._tell(process, search)
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._fail(error)
        finally:
            self.runs.clear()
            process.close()

    def _tell(self, process: WorkerProcess, search: Future[None]) -> None:
        told = None
        while not search.done():
            if self._closing.wait(UPDATE_S):
                return
            if process.has_sent_all and (update := self._update()) != told:
                process.send(update)
                told = replace(update, found=None, answer=None)
        try:
            search.result()
        except ProcessEndedError as error:
            self.runs.clear()  # before anybody reads the note
            if not self.session.done():
                self._note(f"failed: {error}")
        except Exception as error:
            lines = "\n".join(getattr(error, "__notes__", [str(error)])).splitlines()[-LAST_LINES:]
            msg = (
                "the search for schedules failed in its process; solve with one thread, and please "
                "report this with the problem:\n" + "\n".join(lines)
            )
            raise BackendError(msg) from error

    def _update(self) -> ProofState:
        session, best, news = self.session, self.session.bounds.incumbent, None
        if best is not None and best.value < self._known:
            self._known = best.value
            news = FoundSchedule(best.schedule, best.value)
        return ProofState(
            bound=session.bounds.lower,
            columns=session.columns,
            found=news,
            answer=self._answers.popleft() if self._answers else None,
        )

    def _hear(self, news: FoundSchedule) -> None:
        """Offer what the search has found."""
        self._known = min(self._known, news.value)
        try:
            self.session.offer(news.schedule)
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._fail(error)

    def _note(self, what: str) -> None:
        text = f"the process that searches for schedules {what}; the solve goes on without it"
        self.session.log.append(f"{text}\n")
        _LOG.warning("%s", text)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._closing.set()
        self.session.stop.set()


# -- in the process --------------------------------------------------------------------------------


class PrimalSearch:
    """The primal heuristic in its process: messages come with its job, schedules go as news."""

    def __init__(
        self, job: WorkerJob, problem: Problem, request: Request, params: LazyParams
    ) -> None:
        self.job = job
        request = replace(request, started_s=time.monotonic(), wall_end_s=None)
        request = replace(request, on_progress=self._report)
        self.session = Session(problem, request, params=params)
        self.primal = PrimalHeuristic(self.session, is_waited_for=self._is_waited_for)
        self._answer: Schedule | None = None
        self._known = float("inf")

    def run(self) -> None:
        """Search until the solve ends: with each new answer, else locally."""
        while not self.session.done():
            if self._is_waited_for() and self._answer is not None:
                answer, self._answer = self._answer, None
                self.primal.repair(answer)
            else:
                self.primal.improve()

    def take(self, state: ProofState) -> None:
        """Take note of what the proof knows."""
        session = self.session
        session.columns = max(session.columns, state.columns)
        session.raise_bound(state.bound)
        if state.found is not None:
            self._known = min(self._known, state.found.value)
            session.offer(state.found.schedule)
        self._answer = state.answer or self._answer

    def _is_waited_for(self) -> bool:
        """Take note of what has come; return whether there is an answer to search from."""
        for state in self.job.messages():
            self.take(state)
        return self._answer is not None

    def _report(self, _: SolveProgress) -> None:
        """Send the best schedule, if it is news to the proof."""
        best = self.session.bounds.incumbent
        if best is not None and best.value < self._known:
            self._known = best.value
            self.job.tell(FoundSchedule(best.schedule, best.value))


def search_schedules(
    job: WorkerJob, problem: Problem, request: Request, params: LazyParams, state: ProofState
) -> None:
    """Search for schedules for the solve in another process, until that has enough."""
    with infrequent_gc():
        search = PrimalSearch(job, problem, request, params)
        search.take(state)
        search.run()
