"""Run a solve in a thread, so that Ctrl-C stops the solver and the incumbent is preserved."""

from __future__ import annotations

import atexit
import math
import signal
import threading
import time
from concurrent.futures import Future
from contextvars import copy_context
from typing import TYPE_CHECKING, Final, TypeVar

from poetmodel.clock import block_ctrl_c
from poetmodel.errors import SOLVER_THREAD, TimeLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_POLL_S: Final = 0.1
"""Maximum time until Ctrl-C is handled [s]."""
_MAX_EXIT_WAIT_S: Final = 60.0
"""Maximum time for which an exiting program waits for a late solver [s]. HiGHS has returned
43 s after its limit, and in some cases never."""


def run_interruptibly(
    solve: Callable[[], T], stop: threading.Event, *, max_s: float | None = None
) -> T:
    """Return the result of `solve`, executed in a thread so that Ctrl-C is handled.

    The first Ctrl-C sets `stop`, after which `solve` should return its best result; the second, or
    `max_s` (with `TimeLimitError`), abandons the thread. The main thread waits for a plain lock:
    Python 3.11's ``Thread.join`` and ``Condition`` fail if Ctrl-C arrives while waiting.
    """
    context = copy_context()
    futures: list[Future[T]] = []
    running_lock = threading.Lock()
    running_lock.acquire()

    def run_solve() -> None:
        """Solve; append a future with result or exception to `futures`, and release the lock."""
        future = Future[T]()
        try:  # the caller's context carries its time limit into the thread
            future.set_result(context.run(solve))
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            future.set_exception(error)
        futures.append(future)
        running_lock.release()

    def wait_for_thread() -> None:
        """Wait until the thread has a result or an exception, or the deadline passes.

        Restores the handler of Ctrl-C repeatedly: Gurobi replaces it by one that prints to stdout.
        """
        sigint_handler = signal.getsignal(signal.SIGINT)
        is_main_thread = (
            sigint_handler is not None and threading.current_thread() is threading.main_thread()
        )
        while not futures and time.monotonic() < deadline_s:
            running_lock.acquire(timeout=_POLL_S)
            if is_main_thread:
                signal.signal(signal.SIGINT, sigint_handler)

    thread = threading.Thread(target=run_solve, name=SOLVER_THREAD, daemon=True)
    deadline_s = math.inf if max_s is None else time.monotonic() + max_s
    try:
        with block_ctrl_c():  # `start` waits for the thread
            thread.start()
        wait_for_thread()
    except KeyboardInterrupt:
        stop.set()
        if not (thread.is_alive() or futures):  # Ctrl-C arrived before the thread started
            raise
        wait_for_thread()
    if not futures:
        stop.set()
        # A callback into Python after the end of the interpreter would abort the program.
        atexit.register(thread.join, _MAX_EXIT_WAIT_S)
        raise TimeLimitError("the solver has not ended in time")
    return futures[0].result()
