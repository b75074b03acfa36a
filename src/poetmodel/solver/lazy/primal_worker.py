"""The primal worker: a process that searches for schedules, beside the proof.

Each has a core of its own. What the proof learns goes one way, better schedules come the other: as
pickles, through pipes that nobody else writes to. Each side has a verifier of its own for what the
other side sends.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

from poetmodel.backends.worker import ctrl_c_blocked
from poetmodel.clock import rare_collections
from poetmodel.errors import BackendError
from poetmodel.solver.lazy.primal import PrimalHeuristic
from poetmodel.solver.lazy.session import Session

if TYPE_CHECKING:
    from typing import NoReturn

    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import SolveProgress

LAST_LINES: Final = 5
"""How much of what a process wrote before it failed is reported."""
PROGRAM: Final = """\
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from poetmodel.solver.lazy.primal_worker import serve
serve()
"""
"""What the process runs: modules are found where the other one finds them."""

_LOG: Final = logging.getLogger(__name__)


class FoundSchedule(NamedTuple):
    """A schedule that the sender's verifier accepts."""

    schedule: Schedule
    value: float
    """Its value beyond what every schedule pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofState:
    """What the proof knows."""

    bound: float
    """Best lower bound."""
    columns: int
    """Most columns of a relaxation."""
    found: FoundSchedule | None
    """The best schedule, if the search does not know it."""
    answer: Schedule | None
    """The latest answer of a relaxation, if the search has not had it."""


class PrimalWorker:
    """The primal heuristic in a process of its own, as the proof sees it.

    A context: some time after it is entered the process is started, and when it is left the process
    is no more. Schedules that the process finds are offered to the session.

    If the process cannot be started, or is ended from outside (where memory is short, say), that
    goes into the solve's log, and the solve goes on without it. If its program fails, or the
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
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._attend, name="poetmodel-search", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing.set()
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def put(self, answer: Schedule) -> None:
        """Let the process search from this answer, and no longer from one before it."""
        self._answers.append(answer)

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure

    # -- the thread that owns the process ------------------------------------------------------

    def _attend(self) -> None:
        if self._closing.wait(self.session.params.worker_start_s):
            return
        try:
            with tempfile.TemporaryFile() as errors:
                self._converse(errors)
        except OSError as error:
            self._note(f"could not be started ({error})")
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._fail(error)

    def _converse(self, errors: IO[bytes]) -> None:
        """Start the process, tell it what is new until it has ended or shall end, and clean up."""
        session, params = self.session, self.session.params
        left_s = max(params.worker_update_s, session.request.remaining_s())
        request = replace(session.request, on_progress=None, time_limit_s=left_s)
        beginning = pickle.dumps(sys.path) + pickle.dumps((session.problem, request, params))
        with self._lock:
            if self._closing.is_set():
                return
            process = self._process = _start(errors)
        self.runs.set()
        into, out = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        listener = threading.Thread(target=self._listen, args=(out,), daemon=True)
        listener.start()
        try:
            with suppress(OSError):  # it has ended
                self._tell(process, into, beginning)
        finally:
            self.runs.clear()
            process.kill()
            process.wait()
            listener.join()
            out.close()
            with suppress(OSError):
                into.close()
        if not self._closing.is_set():
            errors.seek(0)
            self._ended(process.returncode, errors.read().decode(errors="replace"))

    def _tell(self, process: subprocess.Popen[bytes], into: IO[bytes], beginning: bytes) -> None:
        into.write(beginning)
        told = None
        while process.poll() is None:
            update = self._update()
            if update != told:
                into.write(pickle.dumps(update))
                into.flush()
            told = replace(update, found=None, answer=None)
            if self._closing.wait(self.session.params.worker_update_s):
                break

    def _update(self) -> ProofState:
        session, best, found = self.session, self.session.bounds.incumbent, None
        if best is not None and best.value < self._known:
            self._known = best.value
            found = FoundSchedule(best.schedule, best.value)
        return ProofState(
            bound=session.bounds.lower,
            columns=session.columns,
            found=found,
            answer=self._answers.popleft() if self._answers else None,
        )

    def _ended(self, status: int, errors: str) -> None:
        """Deal with a process that ended by itself: its work done (0), failed (1) or ended."""
        if status == 1:
            last = "\n".join(errors.splitlines()[-LAST_LINES:])
            msg = (
                "the search for schedules failed in its process; solve with one thread, and please "
                f"report this with the problem:\n{last}"
            )
            self._fail(BackendError(msg))
        elif status != 0 and not self.session.done():
            self._note(f"was ended from outside (status {status})")

    def _note(self, what: str) -> None:
        text = f"the process that searches for schedules {what}; the solve goes on without it"
        self.session.log.append(f"{text}\n")
        _LOG.warning("%s", text)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._closing.set()
        self.session.stop.set()

    # -- the thread that listens to it ---------------------------------------------------------

    def _listen(self, out: IO[bytes]) -> None:
        """Offer what arrives, until nothing more does."""
        try:
            while True:
                found = _receive(out)
                self._known = min(self._known, found.value)
                self.session.offer(found.schedule)
        except (EOFError, pickle.UnpicklingError):
            pass  # it has ended, perhaps in the middle of a word
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._fail(error)


def _start(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return start_python(PROGRAM, errors)


def start_python(program: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process for a program, with pipes to and from it, which Ctrl-C does not reach.

    Raises `OSError` if there is no Python to start, or no room for it.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        msg = "no Python interpreter is known"
        raise OSError(msg)
    with ctrl_c_blocked():
        return subprocess.Popen(  # noqa: S603 - Python itself
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )


def _receive(source: IO[bytes]) -> Any:
    return pickle.load(source)  # noqa: S301 - from the other process


# -- in the process ----------------------------------------------------------------------------


class WorkerService:
    """The primal heuristic in its process: news come from `source`, schedules go to `target`."""

    def __init__(self, source: IO[bytes], target: IO[bytes]) -> None:
        self.source, self.target = source, target
        problem, request, params = _receive(source)
        request = replace(request, on_progress=self._report, started_s=time.monotonic())
        self.session = Session(problem, request, params=params)
        self.primal = PrimalHeuristic(self.session, is_waited_for=lambda: bool(self._answers))
        self._answers: deque[Schedule] = deque(maxlen=1)
        self._known = float("inf")
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Search until the solve ends: with each new answer, else locally."""
        self._hear(_receive(self.source))
        threading.Thread(target=self._listen, daemon=True).start()
        while not self.session.done():
            if self._answers:
                self.primal.repair(self._answers.popleft())
            else:
                self.primal.improve()
        if self._failure is not None:
            raise self._failure

    def _listen(self) -> None:
        """Take note of news; when no more can come, the solve is over."""
        try:
            while True:
                self._hear(_receive(self.source))
        except (EOFError, pickle.UnpicklingError):
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._failure = error
        finally:
            self.session.stop.set()

    def _hear(self, update: ProofState) -> None:
        session = self.session
        with session.lock:
            session.columns = max(session.columns, update.columns)
        session.raise_bound(update.bound)
        if update.found is not None:
            self._known = min(self._known, update.found.value)
            session.offer(update.found.schedule)
        if update.answer is not None:
            self._answers.append(update.answer)

    def _report(self, _: SolveProgress) -> None:
        """Send the best schedule, if it is news to the proof."""
        with self._lock:
            best = self.session.bounds.incumbent
            if best is None or best.value >= self._known:
                return
            self._known = best.value
            pickle.dump(FoundSchedule(best.schedule, best.value), self.target)
            self.target.flush()


def serve() -> NoReturn:
    """Search for schedules for the process that started this one, and end when it has enough.

    What solvers print goes where errors go, as standard output is for schedules.
    """
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    status = 1
    try:
        with rare_collections():
            WorkerService(sys.stdin.buffer, target).run()
        status = 0
    except BaseException:  # noqa: BLE001 - the other process reads it
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # at once, whatever its threads are doing
