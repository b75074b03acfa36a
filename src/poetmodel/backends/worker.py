"""Solving in a thread, so that Ctrl-C stops the solver and keeps what it has found."""

from __future__ import annotations

import atexit
import math
import signal
import threading
import time
from concurrent.futures import Future
from contextvars import copy_context
from typing import TYPE_CHECKING, Final, TypeVar

from poetmodel.clock import ctrl_c_blocked
from poetmodel.errors import TimeLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_POLL_S: Final = 0.1
"""How long Ctrl-C may go unnoticed [s]."""
_MOST_AT_EXIT_S: Final = 60.0
"""How long a program that ends waits for a solver that was left behind [s]: HiGHS has been seen to
come back 43 s after its limit, and never."""


def run_interruptibly(
    solve: Callable[[], T], stop: threading.Event, *, most_s: float | None = None
) -> T:
    """Run a solve in a thread of its own and return what it returns.

    The first Ctrl-C sets `stop`, soon after which the solve must end; what it has by then is
    returned. A second Ctrl-C, or one before the solve has begun, is raised; the solver is left
    behind to notice `stop` by itself. So it is where it has not ended after `most_s`, and
    `TimeLimitError` is raised: some solvers look at no clock for a while. A Python
    program waits for it before it ends, but not for ever; the command line does not.

    Notes
    -----
    While a solver runs, Python handles no signal in the thread that called it, and each solver
    deals with signals in its own way. The main thread therefore only waits. It waits for a plain
    lock: where Ctrl-C strikes inside it, ``Thread.join`` of Python 3.11 takes a live thread for
    finished, and a ``Condition``, and so a ``Future``, releases a lock that it does not hold.
    """
    context = copy_context()
    ended: list[Future[T]] = []
    running = threading.Lock()
    running.acquire()

    def work() -> None:
        future = Future[T]()
        try:  # in the caller's context, so that its time limit holds in the thread, too
            future.set_result(context.run(solve))
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            future.set_exception(error)
        ended.append(future)
        running.release()

    def wait() -> None:
        """Wait, and keep Ctrl-C: Gurobi takes it for a solve, and prints where JSON should be."""
        handler = signal.getsignal(signal.SIGINT)
        mine = handler is not None and threading.current_thread() is threading.main_thread()
        while not ended and time.monotonic() < until_s:
            running.acquire(timeout=_POLL_S)
            if mine:
                signal.signal(signal.SIGINT, handler)

    thread = threading.Thread(target=work, name="poetmodel-solve", daemon=True)
    until_s = math.inf if most_s is None else time.monotonic() + most_s
    try:
        with ctrl_c_blocked():  # `start` waits, too
            thread.start()
        wait()
    except KeyboardInterrupt:
        stop.set()
        if not (thread.is_alive() or ended):  # Ctrl-C came before the thread did
            raise
        wait()
    if not ended:
        stop.set()
        # What calls back into Python after its end would abort the program.
        atexit.register(thread.join, _MOST_AT_EXIT_S)
        raise TimeLimitError("the solver has not ended in time")
    return ended[0].result()
