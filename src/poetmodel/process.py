"""Worker processes: a separate Python process that executes jobs, with messages in both directions.

Jobs, messages and results are pickled and sent through two pipes. On both sides, threads read and
write the pipes, so that senders are never blocked and an interrupt never truncates a frame. A
process ends when it is killed, or when its parent process has ended.
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

from poetmodel.clock import block_ctrl_c
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
"""Program of the process; it has the parent's module search path."""
CANCEL_GRACE_S: Final = 0.2
"""Time after which a cancelled job that has not ended is interrupted [s]."""


class ProcessEndedError(BrokenExecutor):
    """The process of a job ended before the job did."""


# -- parent process --------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The current job on the caller's side."""

    number: int
    future: Future[Any]
    on_progress: Callable[[Any], None] | None


class WorkerProcess:
    """A Python process that executes jobs, one at a time.

    Ctrl-C in a terminal does not reach it, and its output is discarded. It cannot be used from a
    fork of the process that started it.

    Raises
    ------
    OSError
        If there is no Python interpreter, or no process or thread can be started.
    """

    def __init__(self) -> None:
        """Start the process, and the threads that read and write its pipes."""
        if not sys.executable or getattr(sys, "frozen", False):
            msg = "no Python interpreter is known"
            raise OSError(msg)
        self._owner = os.getpid()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._outbox.put(pickle.dumps(sys.path))
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._status: int | None = None
        with block_ctrl_c():
            self._process = subprocess.Popen(  # noqa: S603 - Python itself
                [sys.executable, "-P", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            self._reader = threading.Thread(target=self._read_frames, daemon=True)
            try:
                self._reader.start()
                threading.Thread(target=self._write_frames, daemon=True).start()
            except RuntimeError as error:
                with self._process:
                    self.end()
                    if self._reader.is_alive():
                        self._reader.join()
                raise OSError(f"{error}") from error

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._status is None

    @property
    def is_busy(self) -> bool:
        """Whether a job is in progress."""
        return self._call is not None and not self._call.future.done()

    @property
    def has_sent_all(self) -> bool:
        """Whether no frame is waiting to be written."""
        return self._outbox.empty()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        on_progress: Callable[[Any], None] | None = None,
    ) -> Future[Any]:
        """Call a function in the process with a `WorkerJob` and the arguments.

        The future gets the function's result, its exception with the traceback as a note, or
        `ProcessEndedError`. `on_progress` is called with each progress message of the job, in
        another thread. An exception of `on_progress` ends the process and is set in the future.
        """
        payload = pickle.dumps((function, arguments))
        with self._lock:
            number = 1 if self._call is None else self._call.number + 1
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()
            self._call = _Call(number, future, on_progress)
            if self._status is not None:
                future.set_exception(self._ended_error())
        self._send("call", number, payload)
        return future

    def send(self, message: Any) -> None:
        """Send a message to the current job."""
        self._send("message", 0, pickle.dumps(message))

    def cancel(self) -> None:
        """Request cancellation of the current job; it is interrupted after `CANCEL_GRACE_S`."""
        self._send("cancel", 0, b"")

    def end(self) -> None:
        """Kill the process, without waiting for its end."""
        if os.getpid() == self._owner:
            self._process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self.end()
        if os.getpid() == self._owner and threading.current_thread() is not self._reader:
            self._reader.join()

    def _send(self, *frame: Any) -> None:
        self._outbox.put(pickle.dumps(frame))

    def _write_frames(self) -> None:
        """Write queued frames until the process has ended."""
        with suppress(OSError), cast("IO[bytes]", self._process.stdin) as stream:
            while (frame_bytes := self._outbox.get()) is not None:
                stream.write(frame_bytes)
                stream.flush()

    def _read_frames(self) -> None:
        """Handle frames until the process has ended.

        Then set the status and fail the pending job.
        """
        failure: BaseException | None = None
        try:
            with cast("IO[bytes]", self._process.stdout) as stream:
                while (frame := _read_frame(stream)) is not None:
                    self._handle_frame(*frame)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the job gets it
            failure = error
        self._process.kill()
        status = self._process.wait()
        self._outbox.put(None)
        with self._lock:
            self._status = status
            if self._call is not None and not self._call.future.done():
                self._call.future.set_exception(failure or self._ended_error())

    def _handle_frame(self, number: int, kind: str, payload: bytes) -> None:
        """Set the result of the current job, or call `on_progress`; ignore frames of ended jobs."""
        call = self._call
        if call is None or call.number != number or call.future.done():
            return
        value = pickle.loads(payload)  # noqa: S301 - from the process started here
        if kind == "raised":
            call.future.set_exception(value)
        elif kind == "returned":
            call.future.set_result(value)
        elif call.on_progress is not None:
            call.on_progress(value)

    def _ended_error(self) -> ProcessEndedError:
        return ProcessEndedError(f"the process ended unexpectedly (status {self._status})")


def _read_frame(stream: IO[bytes]) -> tuple[Any, ...] | None:
    """Read a frame from a pipe; None if the other side has ended, also within a frame."""
    try:
        return cast("tuple[Any, ...]", pickle.load(stream))  # noqa: S301 - from the other process
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


# -- worker process --------------------------------------------------------------------------------


class WorkerJob:
    """A job from the worker's side."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell
        """Sends a progress message to the parent process."""
        self.cancelled = False
        """Whether cancellation was requested."""
        self.inbox: SimpleQueue[bytes] = SimpleQueue()

    def messages(self) -> Iterator[Any]:
        """Yield the messages received since the last call."""
        while not self.inbox.empty():
            yield pickle.loads(self.inbox.get())  # noqa: S301 - from the other process


class _Service:
    """The worker's side: reads frames, executes jobs, and writes results."""

    def __init__(self, source: IO[bytes], target: IO[bytes]) -> None:
        self.source, self.target = source, target
        self.calls: SimpleQueue[tuple[int, WorkerJob, bytes]] = SimpleQueue()
        self.outbox: SimpleQueue[bytes] = SimpleQueue()
        self.job: WorkerJob | None = None

    def read_frames(self) -> None:
        """Handle frames of the parent process until it has ended.

        Then exit without finishing the job.
        """
        job = WorkerJob(lambda _: None)
        while (frame := _read_frame(self.source)) is not None:
            kind, number, payload = frame
            if kind == "call":
                job = WorkerJob(partial(self.send_result, number, "news"))
                self.calls.put((number, job, payload))
            elif kind == "message":
                job.inbox.put(payload)
            else:
                job.cancelled = True
                threading.Timer(CANCEL_GRACE_S, self.interrupt_if_running, (job,)).start()
        os._exit(0)

    def write_frames(self) -> None:
        """Write queued results, in a thread that no interrupt of the main thread affects."""
        while True:
            self.target.write(self.outbox.get())
            self.target.flush()

    def send_result(self, number: int, kind: str, value: Any) -> None:
        """Queue a frame of a job: ``returned``, ``raised`` or ``news``, with a value."""
        self.outbox.put(pickle.dumps((number, kind, pickle.dumps(value))))

    def interrupt_if_running(self, job: WorkerJob) -> None:
        """Interrupt the main thread, as Ctrl-C does, if `job` is still in progress."""
        if self.job is job:
            _thread.interrupt_main()

    def handle_interrupt(self, *_: object) -> None:
        """Raise `KeyboardInterrupt` if the current job was cancelled.

        Otherwise ignore the signal.
        """
        if self.job is not None and self.job.cancelled:
            raise KeyboardInterrupt

    def run_next_job(self) -> None:
        """Wait for the next job, execute it, and send its result or exception."""
        number, job, payload = self.calls.get()
        try:
            try:
                self.job = job
                function, arguments = pickle.loads(payload)  # noqa: S301 - from the other process
                self.send_result(number, "returned", function(job, *arguments))
            finally:
                self.job = None
        except BaseException as error:  # noqa: BLE001 - whoever gave the job gets it
            self.send_result(number, "raised", _to_picklable(error))


def _to_picklable(error: BaseException) -> Exception:
    """Return an exception that can be pickled, with the original traceback as a note."""
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
    """Execute the jobs of the parent process, until it ends.

    Standard output is redirected to standard error, since the pipe of standard output carries
    frames.
    """
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    service = _Service(sys.stdin.buffer, target)
    signal.signal(signal.SIGINT, service.handle_interrupt)
    for loop in (service.read_frames, service.write_frames):
        threading.Thread(target=loop, daemon=True).start()
    while True:
        service.run_next_job()
