"""Surroundings of a long computation: a limit on its time, rarer collections, and no Ctrl-C.

Whoever starts a computation opens the limit, and every loop inside that may be long calls
`check_time_limit`, which raises once the time is over: one clock for all that runs within it. The
limit belongs to the context, as a cancel scope does, so that a loop need not know who is in a
hurry; without one nothing happens.
"""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from poetmodel.errors import TimeLimitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

CHUNK: Final = 65_536
"""Items between two looks at the clock."""
_END_S: Final[ContextVar[float | None]] = ContextVar("end_s", default=None)
"""When the time is over, on the clock of `now_s` [s]."""
_WALL_END_S: Final[ContextVar[float | None]] = ContextVar("wall_end_s", default=None)
"""Where limits are of processor time: when the wall time is over, on the monotonic clock [s]."""


@contextmanager
def processor_clock(wall_s: float) -> Iterator[None]:
    """Count processor time of this process in all time limits inside, until a wall time is over.

    What a solve finds within them does not depend on what else the machine does, as long as that
    leaves it time: after `wall_s` everything ends as by its own limit.
    """
    end_s = time.monotonic() + min(wall_s, time_left_s())
    tokens = _WALL_END_S.set(end_s), _END_S.set(None)
    try:
        yield
    finally:
        _WALL_END_S.reset(tokens[0])
        _END_S.reset(tokens[1])


def wall_end_s() -> float | None:
    """Return when the wall time is over [s]; None where limits are of wall time themselves."""
    return _WALL_END_S.get()


def now_s(*, of_processor: bool | None = None) -> float:
    """Return the time on the clock that limits count here, or on a given one [s].

    Parameters
    ----------
    of_processor : bool, optional
        Whether to read the processor time of this process, not the monotonic clock. By default the
        context decides (`processor_clock`); a thread of its own has another context.
    """
    if of_processor is None:
        of_processor = _WALL_END_S.get() is not None
    return time.process_time() if of_processor else time.monotonic()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let what runs inside take so many seconds from now on, no longer than a limit around it."""
    end_s, around_s = now_s() + seconds, _END_S.get()
    token = _END_S.set(end_s if around_s is None else min(end_s, around_s))
    try:
        yield
    finally:
        _END_S.reset(token)


def check_time_limit() -> None:
    """Raise `TimeLimitError` if the time is over.

    It takes a fraction of a microsecond, and a whole one where processor time counts.
    """
    end_s, until_s = _END_S.get(), _WALL_END_S.get()
    is_over = until_s is not None and time.monotonic() > until_s
    if is_over or (end_s is not None and now_s() > end_s):
        raise TimeLimitError("the time limit has passed")


def time_left_s() -> float:
    """Return the rest of the time, infinite without a limit [s]."""
    end_s = _END_S.get()
    return math.inf if end_s is None else max(0.0, end_s - now_s())


def watched(items: Sequence[T]) -> Iterator[T]:
    """Iterate as quickly as without a limit, which is looked at every `CHUNK` items."""
    return chain.from_iterable(_chunks(items))


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), CHUNK):
        check_time_limit()
        yield items[begin : begin + CHUNK]


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Keep Ctrl-C from this thread for a moment, and for good from what it starts meanwhile.

    On Windows no process started here has a console that it could come from.
    """
    if sys.platform == "win32":
        yield
    else:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


ALLOCATIONS: Final = 20_000
"""Allocations between two collections of the youngest objects; Python's own number is 700."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""Thresholds to return to, one entry for each solve that runs."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python collect garbage less often, until the last solve that runs within it has ended.

    Notes
    -----
    A model or a schedule of a large graph is hundreds of thousands of small objects, which Python
    would look through again and again while they are made: up to a third of the time around the
    solver. Nothing is changed where collections are off, or rarer still.
    """
    with _lock:
        before = gc.get_threshold()
        _before.append(_before[0] if _before else before)
        if 0 < before[0] < ALLOCATIONS:
            gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        with _lock:
            thresholds = _before.pop()
            if not _before:
                gc.set_threshold(*thresholds)
