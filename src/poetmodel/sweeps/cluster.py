"""Workers of a Dask cluster; imported only with a scheduler address."""

from __future__ import annotations

import logging
import re
import socket
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, MissingExtraError, join_names
from poetmodel.sweeps.workers import Isolation, ShippingPool
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

CONNECT_S: Final = 4
"""Maximum time for each of these: to connect to the scheduler, to receive its first message, and to
close the client [s]."""
_LENGTH_BYTES: Final = 8
"""Size of the prefix of a Dask message, which states the length of the message [B]."""
_MAX_GREETING_BYTES: Final = 2**20
"""Maximum size of the first message of a scheduler [B]."""
_ADDRESS: Final = re.compile(
    r"(?:(?:tcp|tls)://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})"
)
"""An address of a scheduler, such as ``tcp://10.0.0.1:8786``; the protocol may be absent."""
_VERSION: Final = "__import__('poetmodel').__version__"
"""Expression that each worker evaluates. Unlike a pickled function, it also reaches workers without
poetmodel, which report an error."""


@contextmanager
def connect(
    scheduler: str, isolation: Isolation | None = None
) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """Context manager: connect to a Dask scheduler; yield a pool and a count of its threads.

    Workers start processes for the runs, with the settings of `isolation` or the defaults. If a
    worker dies, another one repeats its run. Dask's log level stays CRITICAL after the context.
    Raises `InputError` for an unusable scheduler, `MissingExtraError` without the extra
    ``cluster``.
    """
    _check_address(scheduler)
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        raise MissingExtraError(
            "scheduler: a Dask cluster needs the extra: pip install 'poetmodel[cluster]'"
        ) from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are raised, not logged
    try:
        client = distributed.Client(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"scheduler {scheduler!r}: the server at this address is no Dask scheduler ({error})"
        ) from error
    try:
        _check_workers(scheduler, client)
        pool = ShippingPool(client.get_executor(pure=False), isolation or Isolation())
        yield pool, lambda: max(1, sum(client.nthreads().values()))
    finally:
        client.close(timeout=CONNECT_S)


def _check_workers(scheduler: str, client: Any) -> None:
    """Raise `InputError` if no worker is connected, or if one lacks this version of poetmodel."""
    versions = client.run(eval, _VERSION, on_error="return")
    if not versions:
        raise InputError(
            f"scheduler {scheduler!r}: it has no workers; start some: dask worker {scheduler}"
        )
    failed_workers = [
        worker for worker, version in versions.items() if isinstance(version, Exception)
    ]
    if failed_workers:
        raise InputError(
            f"scheduler {scheduler!r}: poetmodel cannot be imported by the workers "
            f"{join_names(failed_workers)}; install poetmodel {__version__} where they run"
        )
    other_versions = [
        f"{worker} has {worker_version}"
        for worker, worker_version in versions.items()
        if worker_version != __version__
    ]
    if other_versions:
        raise InputError(
            f"scheduler {scheduler!r}: expected workers with poetmodel {__version__}, "
            f"{join_names(other_versions)}; install the same version everywhere"
        )


def _check_address(scheduler: str) -> None:
    """Raise `InputError` for a malformed address, or if no Dask scheduler seems to listen.

    Dask itself would retry for minutes. With TLS, any server that accepts a connection passes,
    because the client sends the first message.
    """
    match = _ADDRESS.fullmatch(scheduler)
    if match is None:
        raise InputError(
            f"scheduler {scheduler!r}: expected an address such as tcp://10.0.0.1:8786"
        )
    host, port = match["host"].strip("[]"), int(match["port"])
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            is_dask = scheduler.startswith("tls:") or _greets_like_dask(connection)
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(
            f"scheduler {scheduler!r}: cannot be reached ({error}); is 'dask scheduler' running?"
        ) from error
    if not is_dask:
        raise InputError(
            f"scheduler {scheduler!r}: the server at this address is no Dask scheduler"
        )


def _greets_like_dask(connection: socket.socket) -> bool:
    """Return whether a connection begins with the length of a short message, as Dask's do."""
    length = connection.recv(_LENGTH_BYTES, socket.MSG_WAITALL)
    return len(length) == _LENGTH_BYTES and int.from_bytes(length, "little") < _MAX_GREETING_BYTES
