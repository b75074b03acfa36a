"""Workers for the runs of a sweep: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import re
import socket
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from poetmodel.errors import InputError
from poetmodel.process import WorkerJob, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Workers = tuple[Executor, Callable[[], int]]
    """Workers for the runs, and their number."""

CONNECT_S: Final = 4
"""How long a scheduler may take to answer [s]."""
LENGTH_BYTES: Final = 8
"""Prefix of a message of Dask: its length."""
LARGEST_GREETING: Final = 2**20
"""More bytes than a scheduler greets with."""
_ADDRESS: Final = re.compile(
    r"(?:(?:tcp|tls)://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})"
)
"""An address of a scheduler: ``tcp://10.0.0.1:8786``."""


class LocalProcesses(Executor):
    """Does runs in processes of this machine; those that die are replaced.

    What still runs when it is left is ended.
    """

    def __init__(self) -> None:
        self._processes: list[WorkerProcess] = []

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function in a process."""
        self._processes = [process for process in self._processes if process.is_alive]
        idle = next((process for process in self._processes if not process.is_busy), None)
        if idle is None:
            idle = WorkerProcess()
            self._processes.append(idle)
        return idle.call(_called, function, *arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as its base class has it
        """End all processes at once."""
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.close()


def _called(_: WorkerJob, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@contextmanager
def processes(count: int) -> Iterator[Workers]:
    """Give so many local processes."""
    with LocalProcesses() as pool:
        yield pool, lambda: count


@contextmanager
def cluster(scheduler: str) -> Iterator[Workers]:
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
            client.get_executor(pure=False),
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
    """Whether what comes first is the length of a short message, as from Dask."""
    length = connection.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    return len(length) == LENGTH_BYTES and int.from_bytes(length, "little") < LARGEST_GREETING
