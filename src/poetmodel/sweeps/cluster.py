"""Workers of a Dask cluster; imported only with a scheduler address."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, MissingExtraError, join_names
from poetmodel.sweeps.workers import ShippingPool
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

CONNECT_S: Final = 4
"""Time to connect to the scheduler, and to close the client [s]."""
ANSWER_S: Final = 8.0
"""Maximum time until the scheduler answers [s]."""
_VERSION: Final = "__import__('poetmodel').__version__"
"""Expression that each worker evaluates. Unlike a pickled function, it also reaches workers without
poetmodel, which report an error."""


@contextmanager
def connect(
    scheduler: str, grace_s: float | None = None
) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """Context manager: connect to a Dask scheduler; yield a pool and a count of its threads.

    Workers start processes for the runs, with `grace_s` as for `ShippingPool`. If a worker dies,
    another one repeats its run. Dask's log level stays CRITICAL after the context.
    Raises `InputError` for an unusable scheduler, `MissingExtraError` without the extra
    ``cluster``.
    """
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        raise MissingExtraError(
            "scheduler: a Dask cluster needs the extra: pip install 'poetmodel[cluster]'"
        ) from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are raised, not logged
    _check_scheduler(distributed, scheduler)
    client = distributed.Client(scheduler, timeout=CONNECT_S, set_as_default=False)
    try:
        _check_workers(scheduler, client)
        executor = client.get_executor(pure=False)
        pool = ShippingPool(executor, has_processes=True, grace_s=grace_s)
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


def _check_scheduler(distributed: Any, scheduler: str) -> None:
    """Raise `InputError` unless a Dask scheduler answers in time; a client may wait for ever."""

    async def ask() -> None:
        async with distributed.rpc(scheduler, timeout=CONNECT_S) as remote:
            await asyncio.wait_for(remote.identity(), ANSWER_S)

    try:
        asyncio.run(ask())
    except TimeoutError:
        reason = f"no answer within {ANSWER_S:g} s"
    except Exception as error:  # noqa: BLE001 - Dask has no type for the many ways to fail
        reason = " ".join(str(error).split()) or type(error).__name__
    else:
        return
    raise InputError(
        f"scheduler {scheduler!r}: no Dask scheduler ({reason}); expected an address such as "
        "tcp://10.0.0.1:8786 where 'dask scheduler' runs"
    )
