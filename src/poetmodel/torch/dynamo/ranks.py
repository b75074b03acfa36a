"""Exchange of values between the processes of a group, so that all use one plan."""

from __future__ import annotations

import pickle
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from torch import distributed

from poetmodel.errors import PoetModelError
from poetmodel.torch.cache import digest
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable

_WAIT_S: Final = 120.0
"""Time that a process waits for another beyond the time limit of a solve [s]."""
_EXCHANGE_NUMBERS: Final = count()
"""Numbers of instances, in the order of their first exchange in this process."""


class RankExchange:
    """Exchanges values through the store of PyTorch's default process group.

    All processes must make the same exchanges in the same order.

    Parameters
    ----------
    time_limit_s : float
        Time limit of a solve [s].
    """

    def __init__(self, time_limit_s: float) -> None:
        self._max_wait = timedelta(seconds=time_limit_s + _WAIT_S)
        self._number: int | None = None
        """Number of the instance; None before the first exchange."""
        self._value_numbers = count()

    def share(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute` in the first process; without a group, in this process.

        Parameters
        ----------
        key : str
            Identifies the value. It must be equal in all processes.
        compute : callable
            Called in the first process only; returns the value, which must be picklable.

        Raises
        ------
        CaptureError
            In every process if keys differ, for example because shapes of graphs differ; in the
            waiting processes if another one does not call in time; in all processes but the first
            if `compute` raises a `PoetModelError`, which the first process raises itself.
        RuntimeError
            In all processes but the first if that one returns no result in time, for example
            because `compute` raised another error.
        """
        if _is_alone():
            return compute()
        store, prefix = self._exchange(key, b"")
        if distributed.get_rank() == 0:
            try:
                value = compute()
            except PoetModelError as error:
                store.set(f"{prefix}/answer", pickle.dumps((None, str(error))))
                raise
            store.set(f"{prefix}/answer", pickle.dumps((value, None)))
            return value
        store.wait([f"{prefix}/answer"], self._max_wait)
        value, refusal = pickle.loads(store.get(f"{prefix}/answer"))  # noqa: S301 - of the same job
        if refusal is not None:
            raise CaptureError(refusal)
        return value

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return the values of all processes, by rank; without a group, only `value`.

        Parameters
        ----------
        key : str
            Identifies the value. It must be equal in all processes.
        value : object
            Value of this process, such as a measurement; must be picklable.

        Raises
        ------
        CaptureError
            In every process if keys differ; in the waiting processes if another one does not call
            in time.
        """
        if _is_alone():
            return [value]
        store, prefix = self._exchange(key, pickle.dumps(value))
        size = distributed.get_world_size()
        values = [store.get(f"{prefix}/{rank}").partition(b"\n")[2] for rank in range(size)]
        return [pickle.loads(content) for content in values]  # noqa: S301 - of the same job

    def _exchange(self, key: str, value: bytes) -> tuple[distributed.Store, str]:
        """Write the value of this process to the store, and wait for all processes.

        Returns (store, prefix of the keys of this exchange). Raises `CaptureError` if another
        process has another `key`, or does not call in time.
        """
        if self._number is None:
            self._number = next(_EXCHANGE_NUMBERS)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - no other way
        prefix = f"poetmodel/{self._number}/{next(self._value_numbers)}"
        own_digest = digest(key).encode()
        store.set(f"{prefix}/{rank}", own_digest + b"\n" + value)
        store_keys = [f"{prefix}/{peer}" for peer in range(size)]
        for peer, store_key in enumerate(store_keys):
            try:
                store.wait([store_key], self._max_wait)
            except RuntimeError as error:
                raise CaptureError(
                    f"process {peer} has not planned in {self._max_wait.total_seconds():.0f} s the "
                    f"graph that process {rank} plans now: pass batches of equal shapes to all "
                    "processes, for example with drop_last=True, and compile the same calls in all"
                ) from error
        digests = [store.get(store_key).partition(b"\n")[0] for store_key in store_keys]
        differing_ranks = [
            peer for peer, peer_digest in enumerate(digests) if peer_digest != own_digest
        ]
        if differing_ranks:
            ranks_text = ", ".join(map(str, differing_ranks))
            raise CaptureError(
                f"process {rank} plans another graph than process {ranks_text}: shapes of inputs, "
                "models and versions must be equal in all processes; drop the last batch "
                "if it is smaller (drop_last=True), and pad to one length"
            )
        return store, prefix


def _is_alone() -> bool:
    """Return whether there is no group of more than one process."""
    return not distributed.is_initialized() or distributed.get_world_size() == 1
