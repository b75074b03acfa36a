"""Work in another Python process: jobs and messages one way, news and results the other.

They go as pickles through two pipes that nobody else writes to. Whoever sends is neither kept
waiting nor interrupted in the middle of a word: each pipe has a thread on either side. A process
ends when it is ended, and when the one that started it is gone, however that died.
"""

from __future__ import annotations

import _thread
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

from poetmodel.clock import ctrl_c_blocked
from poetmodel.errors import PoetModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

PROGRAM: Final = """\
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from poetmodel.process import serve
serve()
"""
"""Program of the process: it finds modules where the parent does."""
PATIENCE_S: Final = 0.2
"""How long a cancelled job may take to notice, before it is interrupted [s]."""


class ProcessEndedError(BrokenExecutor):
    """A job whose process has ended before it."""


# -- the one that starts it ------------------------------------------------------------------------


class _Call(NamedTuple):
    """A job as whoever gave it sees it."""

    number: int
    future: Future[Any]
    on_news: Callable[[Any], None] | None


class WorkerProcess:
    """A Python process that does jobs, one at a time, for the one that started it.

    Ctrl-C in a terminal does not reach it, and what it prints nobody sees. A fork of the process
    that started it has no part in it.

    Raises
    ------
    OSError
        If there is no Python to start, or no room for it.
    """

    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            msg = "no Python interpreter is known"
            raise OSError(msg)
        self._owner = os.getpid()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._outbox.put(pickle.dumps(sys.path))
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._status: int | None = None
        with ctrl_c_blocked():
            self._process = subprocess.Popen(  # noqa: S603 - Python itself
                [sys.executable, "-P", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            self._reader = threading.Thread(target=self._read, daemon=True)
            try:
                self._reader.start()
                threading.Thread(target=self._write, daemon=True).start()
            except RuntimeError as error:
                with self._process:
                    self.end()
                    if self._reader.is_alive():
                        self._reader.join()
                raise OSError(f"{error}") from error

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._status is None

    @property
    def is_busy(self) -> bool:
        """Whether it does a job."""
        return self._call is not None and not self._call.future.done()

    @property
    def has_read(self) -> bool:
        """Whether nothing that was sent waits to be written."""
        return self._outbox.empty()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        on_news: Callable[[Any], None] | None = None,
    ) -> Future[Any]:
        """Call a function in the process, with a `WorkerJob` and the arguments.

        The future has what it returns or raises, with the traceback as a note, or
        `ProcessEndedError`. `on_news` gets what the job tells, in a thread of its own; what it
        raises ends the process and is in the future.
        """
        what = pickle.dumps((function, arguments))
        with self._lock:
            number = 1 if self._call is None else self._call.number + 1
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()
            self._call = _Call(number, future, on_news)
            if self._status is not None:
                future.set_exception(self._ended())
        self._send("call", number, what)
        return future

    def send(self, message: Any) -> None:
        """Send a message to the job."""
        self._send("message", 0, pickle.dumps(message))

    def cancel(self) -> None:
        """Tell the job that nobody wants it any more; soon after it is interrupted."""
        self._send("cancel", 0, b"")

    def end(self) -> None:
        """End the process, whatever it does; it takes a moment until it is gone."""
        if os.getpid() == self._owner:
            self._process.kill()

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        self.end()
        if os.getpid() == self._owner and threading.current_thread() is not self._reader:
            self._reader.join()

    def _send(self, *frame: Any) -> None:
        self._outbox.put(pickle.dumps(frame))

    def _write(self) -> None:
        """Write what is to be sent, until the process has ended."""
        with suppress(OSError), cast("IO[bytes]", self._process.stdin) as stream:
            while (data := self._outbox.get()) is not None:
                stream.write(data)
                stream.flush()

    def _read(self) -> None:
        """Take what comes, until the process has ended; then say so."""
        failure: BaseException | None = None
        try:
            with cast("IO[bytes]", self._process.stdout) as stream:
                while (frame := _load(stream)) is not None:
                    self._take(*frame)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the job gets it
            failure = error
        self._process.kill()
        status = self._process.wait()
        self._outbox.put(None)
        with self._lock:
            self._status = status
            if self._call is not None and not self._call.future.done():
                self._call.future.set_exception(failure or self._ended())

    def _take(self, number: int, kind: str, payload: bytes) -> None:
        call = self._call
        if call is None or call.number != number or call.future.done():
            return
        value = pickle.loads(payload)  # noqa: S301 - from the process started here
        if kind == "raised":
            call.future.set_exception(value)
        elif kind == "returned":
            call.future.set_result(value)
        elif call.on_news is not None:
            call.on_news(value)

    def _ended(self) -> ProcessEndedError:
        return ProcessEndedError(f"the process ended unexpectedly (status {self._status})")


def _load(stream: IO[bytes]) -> tuple[Any, ...] | None:
    """Return the next frame of a pipe; None where the other side has ended, perhaps in a word."""
    try:
        return cast("tuple[Any, ...]", pickle.load(stream))  # noqa: S301 - from the other process
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


# -- in the process --------------------------------------------------------------------------------


class WorkerJob:
    """A job as the function that does it sees it."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell
        """Sends news to whoever gave the job."""
        self.cancelled = False
        """Whether nobody wants it any more."""
        self.inbox: SimpleQueue[bytes] = SimpleQueue()

    def messages(self) -> Iterator[Any]:
        """Yield the messages that have come."""
        while not self.inbox.empty():
            yield pickle.loads(self.inbox.get())  # noqa: S301 - from the other process


class _Service:
    """The process's side: what comes, what goes, and the job that is done."""

    def __init__(self, source: IO[bytes], target: IO[bytes]) -> None:
        self.source, self.target = source, target
        self.calls: SimpleQueue[tuple[int, WorkerJob, bytes]] = SimpleQueue()
        self.outbox: SimpleQueue[bytes] = SimpleQueue()
        self.job: WorkerJob | None = None

    def listen(self) -> None:
        """Take what comes until the other process is gone; nobody waits for what is done then."""
        job = WorkerJob(lambda _: None)
        while (frame := _load(self.source)) is not None:
            kind, number, payload = frame
            if kind == "call":
                job = WorkerJob(partial(self.say, number, "news"))
                self.calls.put((number, job, payload))
            elif kind == "message":
                job.inbox.put(payload)
            else:
                job.cancelled = True
                threading.Timer(PATIENCE_S, self.interrupt, (job,)).start()
        os._exit(0)

    def speak(self) -> None:
        """Write what is to be said: the main thread may be interrupted, this one is not."""
        while True:
            self.target.write(self.outbox.get())
            self.target.flush()

    def say(self, number: int, kind: str, value: Any) -> None:
        """Say something of a job."""
        self.outbox.put(pickle.dumps((number, kind, pickle.dumps(value))))

    def interrupt(self, job: WorkerJob) -> None:
        """Interrupt a job that goes on, as Ctrl-C would."""
        if self.job is job:
            _thread.interrupt_main()

    def interrupted(self, *_: object) -> None:
        """End the job if nobody wants it."""
        if self.job is not None and self.job.cancelled:
            raise KeyboardInterrupt

    def work(self) -> None:
        """Do the next job."""
        number, job, what = self.calls.get()
        try:
            try:
                self.job = job
                function, arguments = pickle.loads(what)  # noqa: S301 - from the other process
                self.say(number, "returned", function(job, *arguments))
            finally:
                self.job = None
        except BaseException as error:  # noqa: BLE001 - whoever gave the job gets it
            self.say(number, "raised", _portable(error))


def _portable(error: BaseException) -> Exception:
    """Return an error as it can be sent, with its traceback as a note."""
    lines = "".join(traceback.format_exception(error))
    try:
        if isinstance(error, Exception) and str(pickle.loads(pickle.dumps(error))) == str(error):  # noqa: S301
            error.add_note(lines)
            return error
    except Exception:  # noqa: BLE001, S110 - of another library's class
        pass
    raised: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(error, PoetModelError):
        raised = PoetModelError(str(error))
    raised.add_note(lines)
    return raised


def serve() -> NoReturn:
    """Do the jobs of the process that started this one.

    What solvers print goes where errors go, as standard output belongs to the other process.
    """
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    service = _Service(sys.stdin.buffer, target)
    signal.signal(signal.SIGINT, service.interrupted)
    for loop in (service.listen, service.speak):
        threading.Thread(target=loop, daemon=True).start()
    while True:
        service.work()
