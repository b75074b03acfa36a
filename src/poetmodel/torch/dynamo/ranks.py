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

    `share` and `gather` wait: all processes must call them in the same order, as they do while they
    compile. If one has another key, or does not arrive in time, the others raise `CaptureError`.
    `post` and `find_posts` never wait. Where `is_needed` returns False, a process is alone.
    """

    def __init__(
        self, time_limit_s: float = 0.0, is_needed: Callable[[], bool] = lambda: False
    ) -> None:
        self._is_needed = is_needed
        self._max_wait = timedelta(seconds=time_limit_s + _WAIT_S)
        self._number: int | None = None
        """Number of the instance; None before the first exchange."""
        self._value_numbers = count()

    def share(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the picklable value that `compute` returns in the first process, in all processes.

        `key` must be equal in all: it shows that they plan one graph. If `compute` fails, all do.
        """
        if self.is_alone:
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
        """Return picklable values of all processes by rank. `key`: equal in all, may be reused."""
        if self.is_alone:
            return [value]
        store, prefix = self._exchange(key, pickle.dumps(value))
        size = distributed.get_world_size()
        values = [store.get(f"{prefix}/{rank}").partition(b"\n")[2] for rank in range(size)]
        return [pickle.loads(content) for content in values]  # noqa: S301 - of the same job

    def post(self, key: str, value: Any) -> None:
        """Publish a picklable value of this process."""
        _get_store().set(self._post_key(key, distributed.get_rank()), pickle.dumps(value))

    def find_posts(self, key: str, n_processes: int | None = None) -> list[Any] | None:
        """Return what the first processes posted, by default all; None if one has not yet."""
        count = distributed.get_world_size() if n_processes is None else n_processes
        store, keys = _get_store(), [self._post_key(key, rank) for rank in range(count)]
        if not store.check(keys):
            return None
        return [pickle.loads(store.get(post_key)) for post_key in keys]  # noqa: S301 - of the same job

    def _post_key(self, key: str, rank: int) -> str:
        return f"poetmodel/{self._number}/posts/{digest(key)}/{rank}"

    def _exchange(self, key: str, value: bytes) -> tuple[distributed.Store, str]:
        """Write a value, wait for all, refuse unequal keys; return (store, prefix of its keys)."""
        if self._number is None:
            self._number = next(_EXCHANGE_NUMBERS)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = _get_store()
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

    @property
    def is_alone(self) -> bool:
        """Whether no other process plans the same graph."""
        has_group = distributed.is_initialized() and distributed.get_world_size() > 1
        return not (has_group and self._is_needed())

    @property
    def is_first(self) -> bool:
        """Whether this process solves for all."""
        return self.is_alone or distributed.get_rank() == 0


def _get_store() -> distributed.Store:
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - no other way
