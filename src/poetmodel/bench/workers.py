"""Who solves the cells of a sweep: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

CONNECT_S: Final = 20
"""How long a scheduler may take to answer [s]."""


@contextmanager
def processes(count: int) -> Iterator[Callable[[], Executor]]:
    """Give a maker of pools of fresh local processes; what still runs at the end is ended.

    Parameters
    ----------
    count : int
        Processes at a time.

    Yields
    ------
    callable
        Makes a pool. It may be called again when a pool has broken because a process died.
    """
    pools: list[ProcessPoolExecutor] = []
    before = set(multiprocessing.active_children())

    def make() -> Executor:
        pool = ProcessPoolExecutor(
            count, mp_context=multiprocessing.get_context("spawn"), initializer=_follow_parent
        )
        pools.append(pool)
        return pool

    try:
        yield make
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        started = set(multiprocessing.active_children()) - before
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _follow_parent() -> None:
    """Leave Ctrl-C to the process that started this one, and end when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def cluster(scheduler: str) -> Iterator[Callable[[], Executor]]:
    """Give the workers of a running Dask cluster; cells of a worker that dies go to another.

    Parameters
    ----------
    scheduler : str
        Its address, such as ``tcp://10.0.0.1:8786``. The workers need the same poetmodel, and the
        files that cells name.

    Raises
    ------
    InputError
        If Dask is not installed, or nobody answers at the address.
    """
    try:
        from distributed import Client
    except ImportError:
        msg = "scheduler: a Dask cluster needs the extra: pip install 'poetmodel[cluster]'"
        raise InputError(msg) from None
    try:
        client: Any = cast("Any", Client)(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        msg = f"scheduler {scheduler!r}: cannot be reached ({error})"
        raise InputError(msg) from error
    try:
        yield lambda: client.get_executor(pure=False)
    finally:
        client.close()
