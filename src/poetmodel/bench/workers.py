"""Who does the runs of a sweep: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Final, cast

from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

Pools = tuple["Callable[[], Executor]", "Callable[[], int]"]
"""What makes a pool, and what says how many runs it is given at a time."""

CONNECT_S: Final = 4
"""How long a scheduler may take to answer [s]."""
LENGTH_BYTES: Final = 8
"""What a message of Dask begins with: its length."""
LARGEST_GREETING: Final = 2**20
"""More bytes than a scheduler greets with."""
GRACE_S: Final = 2
"""How long a process may take to end when it is told to [s]."""
_ADDRESS: Final = re.compile(
    r"(?:(?:tcp|tls)://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})"
)
"""An address of a scheduler: ``tcp://10.0.0.1:8786``."""


@contextmanager
def processes(count: int) -> Iterator[Pools]:
    """Give a maker of pools of fresh local processes; what still runs at the end is ended.

    It is called again when a pool has broken because a process died.
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
        yield make, lambda: count
    except BaseException:  # processes may be in the middle of a solve
        started = set(multiprocessing.active_children()) - before
        for process in started:
            process.terminate()
        for process in started:
            process.join(GRACE_S)
            process.kill()
            process.join()
        raise
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the process that started this one, and end when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _end()


def _end() -> None:
    """End this process whatever it does, but leave no named semaphore.

    Pyomo makes one when it is loaded; Python warns of those that no process has taken away.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]  # noqa: SLF001 - as an ordinary end
    os._exit(1)


@contextmanager
def cluster(scheduler: str) -> Iterator[Pools]:
    """Give the workers of a running Dask cluster; runs of a worker that dies go to another.

    As many runs are handed over as the workers have threads, and as many again, to wait there.

    The workers need the same poetmodel, and the files that runs name.
    """
    try:
        from distributed import Client
    except ImportError:
        raise InputError(
            "scheduler: a Dask cluster needs the extra: pip install 'poetmodel[cluster]'"
        ) from None
    try:
        client: Any = cast("Any", Client)(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"scheduler {scheduler!r}: something answers there, but no Dask scheduler ({error})"
        ) from error
    try:
        yield (
            lambda: client.get_executor(pure=False),
            lambda: max(1, 2 * sum(client.ncores().values())),
        )
    finally:
        client.close()


def check_scheduler(scheduler: str) -> None:
    """Raise `InputError` unless a Dask scheduler seems to answer; Dask itself would try for long.

    A scheduler greets first; with TLS the client does.
    """
    match = _ADDRESS.fullmatch(scheduler)
    if match is None:
        raise InputError(
            f"scheduler {scheduler!r}: expected an address such as tcp://10.0.0.1:8786"
        )
    host, port = match["host"].strip("[]"), int(match["port"])
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as found_there:
            speaks_dask = scheduler.startswith("tls:") or _is_greeting(found_there)
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(
            f"scheduler {scheduler!r}: cannot be reached ({error}); is 'dask scheduler' running?"
        ) from error
    if not speaks_dask:
        raise InputError(f"scheduler {scheduler!r}: what listens there is no Dask scheduler")


def _is_greeting(connection: socket.socket) -> bool:
    """Return whether what comes first is the length of a short message, as from Dask."""
    length = connection.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    return len(length) == LENGTH_BYTES and int.from_bytes(length, "little") < LARGEST_GREETING
