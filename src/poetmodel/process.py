"""Worker processes: separate Python processes that execute jobs, with messages in both directions.

Jobs, messages and results are pickled and sent through two pipes. On both sides, threads read and
write the pipes, so that senders are never blocked and an interrupt never truncates a frame. A
process ends when it is killed or crashes, or when its parent process has ended.
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
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

from poetmodel.clock import block_ctrl_c
from poetmodel.errors import PoetModelError, TimeLimitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

PROGRAM: Final = """\
import os, pickle, sys
frames = os.fdopen(os.dup(0), "rb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:] = pickle.load(frames)
from poetmodel.process import serve
serve(frames)
"""
"""Program of the worker process: reads the search path of modules, then executes jobs. Standard
input is replaced, so that programs that a job starts cannot read frames."""
CANCEL_GRACE_S: Final = 0.2
"""Time after which a cancelled job that has not ended is interrupted [s]."""


class ProcessEndedError(BrokenExecutor):
    """The process of a job ended before the job did."""


# -- parent process --------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The last job, as the parent process records it."""

    number: int
    """Number of the job, starting with 1."""
    future: Future[Any]
    """Receives the result or exception."""
    on_progress: Callable[[Any], None] | None
    """Function called with each progress message; None to ignore these."""


class WorkerProcess:
    """A Python process that executes jobs, one at a time; raises `OSError` if it cannot start.

    Ctrl-C in a terminal does not interrupt the process, and its output is discarded. A fork of the
    parent process cannot use the worker process.
    """

    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            msg = "no Python interpreter is known"
            raise OSError(msg)
        self._parent_pid = os.getpid()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._outbox.put(pickle.dumps(sys.path))
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._status: int | None = None
        self._exceeded_s: float | None = None
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
        """Whether the process is running; still True for a moment after its end."""
        return self._status is None

    @property
    def is_busy(self) -> bool:
        """Whether a job is in progress."""
        return self._call is not None and not self._call.future.done()

    @property
    def has_sent_all(self) -> bool:
        """Whether no frame is waiting to be written; the last one may be only partly written."""
        return self._outbox.empty()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        on_progress: Callable[[Any], None] | None = None,
        limit_s: float | None = None,
    ) -> Future[Any]:
        """Call a function in the process with a `WorkerJob` and the arguments.

        The previous job must have ended. The future receives the result, the exception with its
        traceback as a note (see `_to_picklable`), or `ProcessEndedError`; `TimeLimitError` after
        `limit_s`, when the process is killed. `on_progress` is called in another thread; its
        exceptions end the process.
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
        if limit_s is not None:
            timer = threading.Timer(limit_s, self._end_late_job, (future, limit_s))
            timer.daemon = True
            future.add_done_callback(lambda _: timer.cancel())
            timer.start()
        return future

    def send(self, message: Any) -> None:
        """Send a message to the job in progress; has no effect without one."""
        self._send("message", 0, pickle.dumps(message))

    def cancel(self) -> None:
        """Set `WorkerJob.cancelled`, and interrupt the job after `CANCEL_GRACE_S`.

        The future of a job that does not catch this `KeyboardInterrupt` receives a `RuntimeError`.
        """
        self._send("cancel", 0, b"")

    def end(self) -> None:
        """Kill the process, without waiting for its end; has no effect in a fork of the parent."""
        if os.getpid() == self._parent_pid:
            self._process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end; a pending job fails with `ProcessEndedError`.

        Does not wait in the thread that calls `on_progress`; has no effect in a fork of the parent.
        """
        self.end()
        if os.getpid() == self._parent_pid and threading.current_thread() is not self._reader:
            self._reader.join()

    def _end_late_job(self, future: Future[Any], limit_s: float) -> None:
        """Kill the process if the job of `future` is still in progress after its limit."""
        if not future.done():
            self._exceeded_s = limit_s
            self.end()

    def _send(self, *frame: Any) -> None:
        self._outbox.put(pickle.dumps(frame))

    def _write_frames(self) -> None:
        """Write queued frames until the process has ended, or writing fails."""
        with suppress(OSError), cast("IO[bytes]", self._process.stdin) as stream:
            while (frame_bytes := self._outbox.get()) is not None:
                stream.write(frame_bytes)
                stream.flush()

    def _read_frames(self) -> None:
        """Handle frames until the process has ended, or handling a frame fails.

        Then ends the process and `_write_frames`, and sets an exception in a pending future.
        """
        failure: BaseException | None = None
        try:
            with cast("IO[bytes]", self._process.stdout) as stream:
                while (frame := _read_frame(stream)) is not None:
                    self._handle_frame(*frame)
        except BaseException as error:  # noqa: BLE001 - set in the future of the job
            failure = error
        self._process.kill()
        status = self._process.wait()
        self._outbox.put(None)
        with self._lock:
            self._status = status
            if self._call is not None and not self._call.future.done():
                self._call.future.set_exception(failure or self._ended_error())

    def _handle_frame(self, number: int, kind: str, payload: bytes) -> None:
        """End the job (returned, raised) or call `on_progress`; ignore frames of earlier jobs."""
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

    def _ended_error(self) -> Exception:
        if self._exceeded_s is not None:
            return TimeLimitError(f"the job did not end within {self._exceeded_s:.0f} s")
        return ProcessEndedError(f"the process ended unexpectedly (status {self._status})")


def _read_frame(stream: IO[bytes]) -> tuple[Any, ...] | None:
    """Read a frame from a pipe; None if the other side has ended, or for an incomplete frame."""
    try:
        return cast("tuple[Any, ...]", pickle.load(stream))  # noqa: S301 - from the other process
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


class LocalProcesses(Executor):
    """An executor with any number of processes of this machine; dead processes are replaced.

    With `limit_of`, each job has a process of its own, which is killed after
    ``limit_of(*arguments)`` [s]. Each process imports the `preloaded` modules before its first job.
    """

    def __init__(
        self,
        limit_of: Callable[..., float] | None = None,
        *,
        preloaded: Sequence[str] = (),
    ) -> None:
        self._limit_of = limit_of
        self._preloaded = preloaded
        self._processes: list[WorkerProcess] = []
        self._lock = threading.Lock()

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function in an idle process, or in a new one; keyword arguments are ignored."""
        limit_s = None if self._limit_of is None else self._limit_of(*arguments)
        with self._lock:
            self._processes = [process for process in self._processes if process.is_alive]
            idle = [process for process in self._processes if not process.is_busy]
            if limit_s is not None or not idle:
                idle = [WorkerProcess()]
                self._processes += idle
            process, job = idle[0], (self._preloaded, function, *arguments)
            future = process.call(_call_function, *job, limit_s=limit_s)
        if limit_s is not None:
            future.add_done_callback(lambda _: process.end())
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as its base class has it
        """Kill all processes, and wait until they have ended; the arguments are ignored."""
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.close()


# -- worker process --------------------------------------------------------------------------------


def _call_function(
    _: WorkerJob, preloaded: Sequence[str], function: Callable[..., Any], *arguments: Any
) -> Any:
    for module in preloaded:
        import_module(module)
    return function(*arguments)


class WorkerJob:
    """A job in the worker process: cancellation, and messages in both directions."""

    def __init__(self, report_progress: Callable[[Any], None]) -> None:
        self.report_progress = report_progress
        """Sends a progress message to the parent process."""
        self.cancelled = False
        """Whether cancellation was requested."""
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        """Pickled messages of the parent process that `messages` has not yielded."""

    def messages(self) -> Iterator[Any]:
        """Yield the received messages of the parent process that were not yielded before."""
        while not self.inbox.empty():
            yield pickle.loads(self.inbox.get())  # noqa: S301 - from the other process


class _Service:
    """Reads frames, executes jobs, and writes results in the worker process."""

    def __init__(self, source: IO[bytes], target: IO[bytes]) -> None:
        self.source, self.target = source, target
        self.calls: SimpleQueue[tuple[int, WorkerJob, bytes]] = SimpleQueue()
        """Jobs to execute: number, job, and the pickled function and arguments."""
        self.outbox: SimpleQueue[bytes] = SimpleQueue()
        """Frames to write."""
        self.job: WorkerJob | None = None
        """The job in progress; None between jobs."""

    def read_frames(self) -> None:
        """Handle frames of the parent process until it ends; then exit, even during a job.

        Messages and cancellations are for the last job that was received.
        """
        job = WorkerJob(lambda _: None)
        while (frame := _read_frame(self.source)) is not None:
            kind, number, payload = frame
            if kind == "call":
                job = WorkerJob(partial(self.send_frame, number, "progress"))
                self.calls.put((number, job, payload))
            elif kind == "message":
                job.inbox.put(payload)
            else:
                job.cancelled = True
                threading.Timer(CANCEL_GRACE_S, self.interrupt_if_running, (job,)).start()
        os._exit(0)

    def write_frames(self) -> None:
        """Write queued frames until writing raises `OSError`, in a thread without interrupts."""
        while True:
            self.target.write(self.outbox.get())
            self.target.flush()

    def send_frame(self, number: int, kind: str, value: Any) -> None:
        """Queue a frame of job `number`; `kind` is ``returned``, ``raised`` or ``progress``."""
        self.outbox.put(pickle.dumps((number, kind, pickle.dumps(value))))

    def interrupt_if_running(self, job: WorkerJob) -> None:
        """Interrupt the main thread, as Ctrl-C does, if `job` is still in progress."""
        if self.job is job:
            _thread.interrupt_main()

    def handle_interrupt(self, *_: object) -> None:
        """Raise `KeyboardInterrupt` if the current job was cancelled; else ignore the signal."""
        if self.job is not None and self.job.cancelled:
            raise KeyboardInterrupt

    def execute_next_job(self) -> None:
        """Wait for a job and execute it; send its result or its exception to the parent process."""
        number, job, payload = self.calls.get()
        try:
            try:
                self.job = job
                function, arguments = pickle.loads(payload)  # noqa: S301 - from the other process
                self.send_frame(number, "returned", function(job, *arguments))
            finally:
                self.job = None
        except BaseException as error:  # noqa: BLE001 - sent to the parent process
            self.send_frame(number, "raised", _to_picklable(error))


def _to_picklable(error: BaseException) -> Exception:
    """Return an exception that can be pickled, with the original traceback as a note.

    An `error` that cannot becomes a `PoetModelError` if it is one, else a `RuntimeError`.
    """
    traceback_text = "".join(traceback.format_exception(error))
    try:
        if isinstance(error, Exception) and str(pickle.loads(pickle.dumps(error))) == str(error):  # noqa: S301
            error.add_note(traceback_text)
            return error
    except Exception:  # noqa: BLE001, S110 - raised by the class of the error
        pass
    raised: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(error, PoetModelError):
        raised = PoetModelError(str(error))
    raised.add_note(traceback_text)
    return raised


def serve(frames: IO[bytes]) -> NoReturn:
    """Execute the jobs of the parent process until the parent ends; then exit this process.

    Replaces the handler of Ctrl-C. Standard output goes to standard error, since its pipe carries
    frames.
    """
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    service = _Service(frames, target)
    signal.signal(signal.SIGINT, service.handle_interrupt)
    for thread_body in (service.read_frames, service.write_frames):
        threading.Thread(target=thread_body, daemon=True).start()
    while True:
        service.execute_next_job()
