"""Context managers for long computations: time limits, fewer garbage collections, blocked Ctrl-C.

A caller opens a time limit; loops that may be long call `check_time_limit`, which raises once the
limit has passed. The limit is a context variable, so functions need no parameter for it. Without a
limit and outside `processor_clock`, the check has no effect.
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
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from poetmodel.errors import TimeLimitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

CHUNK: Final = 65_536
"""Number of items of `iterate_in_time` between two checks of the time limit."""


@dataclass(slots=True)
class TimeLimit:
    """A time limit, and whether a computation inside returned less than all because of it."""

    end_s: float
    """End on the clock of `now_s` [s]."""
    outer: TimeLimit | None = None
    is_cut_short: bool = False

    def cut_short(self) -> None:
        """State, here and in the outer limits, that the computation was cut short."""
        self.is_cut_short = True
        if self.outer is not None:
            self.outer.cut_short()


_LIMIT: Final[ContextVar[TimeLimit | None]] = ContextVar("limit", default=None)
"""The time limit; None without one."""
_WALL_END_S: Final[ContextVar[float | None]] = ContextVar("wall_end_s", default=None)
"""End of the wall time of `processor_clock` on the monotonic clock [s]; None outside of it."""


@contextmanager
def processor_clock(wall_s: float) -> Iterator[None]:
    """Let time limits inside count processor time, for at most `wall_s` of wall time.

    A solve inside then does not depend on the machine's load. After `wall_s`, or the rest of an
    outer limit, `check_time_limit` raises.
    """
    end_s = time.monotonic() + min(wall_s, time_left_s())
    tokens = _WALL_END_S.set(end_s), _LIMIT.set(None)
    try:
        yield
    finally:
        _WALL_END_S.reset(tokens[0])
        _LIMIT.reset(tokens[1])


def wall_end_s() -> float | None:
    """Return the end of the wall time of `processor_clock` [s]; None if limits count wall time."""
    return _WALL_END_S.get()


def now_s(*, use_processor_time: bool | None = None) -> float:
    """Return the time on the clock that time limits use, or on a given clock [s]."""
    if use_processor_time is None:
        use_processor_time = _WALL_END_S.get() is not None
    return time.process_time() if use_processor_time else time.monotonic()


@contextmanager
def limit_time(seconds: float) -> Iterator[TimeLimit]:
    """Let `check_time_limit` raise after `seconds` on the clock of `now_s`, or an outer limit."""
    end_s, outer = now_s() + seconds, _LIMIT.get()
    limit = TimeLimit(end_s if outer is None else min(end_s, outer.end_s), outer)
    token = _LIMIT.set(limit)
    try:
        yield limit
    finally:
        _LIMIT.reset(token)


def check_time_limit() -> None:
    """Raise `TimeLimitError` if the time limit or the wall time of `processor_clock` has passed."""
    limit, clock_end_s = _LIMIT.get(), _WALL_END_S.get()
    is_over = clock_end_s is not None and time.monotonic() > clock_end_s
    if is_over or (limit is not None and now_s() > limit.end_s):
        raise TimeLimitError("the time limit has passed")


def time_left_s() -> float:
    """Return the remaining time of the time limit [s], 0 or more; infinite without a limit."""
    limit = _LIMIT.get()
    return math.inf if limit is None else max(0.0, limit.end_s - now_s())


def iterate_in_time(items: Sequence[T]) -> Iterator[T]:
    """Return an iterator that checks the time limit before every `CHUNK` items."""
    return chain.from_iterable(_chunks(items))


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), CHUNK):
        check_time_limit()
        yield items[begin : begin + CHUNK]


@contextmanager
def block_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C in this thread, and permanently in processes started inside.

    If no other thread accepts it, a Ctrl-C takes effect at the end.
    """
    if sys.platform == "win32":
        yield
    else:
        blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_signals)


GC_ALLOCATIONS: Final = 20_000
"""Allocations minus deallocations that start a collection of the youngest generation; the default
of Python 3.11 and 3.12 is 700."""

GC_COLLECTIONS: Final = 50
"""Collections of a generation that start one of the next older generation; the default is 10."""

_lock = threading.Lock()
"""Guards the thresholds of the garbage collector."""
_saved_thresholds: list[tuple[int, int, int]] = []
"""Thresholds to restore, one entry per active `infrequent_gc`."""


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Collect garbage less often, in all threads, until the last concurrent use ends.

    A model of a large graph consists of hundreds of thousands of small objects: with default
    thresholds, collections take up to a third of the time outside the solver.
    """
    with _lock:
        thresholds_before = gc.get_threshold()
        _saved_thresholds.append(_saved_thresholds[0] if _saved_thresholds else thresholds_before)
        if 0 < thresholds_before[0] < GC_ALLOCATIONS:
            older = (max(GC_COLLECTIONS, count) for count in thresholds_before[1:])
            gc.set_threshold(GC_ALLOCATIONS, *older)
    try:
        yield
    finally:
        with _lock:
            thresholds = _saved_thresholds.pop()
            if not _saved_thresholds:
                gc.set_threshold(*thresholds)


@contextmanager
def no_gc() -> Iterator[None]:
    """Collect no garbage in this process, unless code calls `gc.collect`."""
    is_gc_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_gc_enabled:
            gc.enable()
