"""One plan for all processes of a group, by the measurements of all: the first one solves."""

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
"""How long a process waits for another beyond the time limit of a solve [s]."""
_BACKENDS: Final = count()
"""Numbers of back ends, in the order in which they first shared something in this process."""


class Ranks:
    """Shares answers through the store of the default group; each process asks in one order.

    Parameters
    ----------
    time_limit_s : float
        Longest time to solve [s].
    """

    def __init__(self, time_limit_s: float) -> None:
        self._wait = timedelta(seconds=time_limit_s + _WAIT_S)
        self._number: int | None = None
        self._asked = count()

    def __reduce__(self) -> tuple[type[Ranks], tuple[float]]:
        """Return how a copy is made: it has shared nothing."""
        return Ranks, (self._wait.total_seconds() - _WAIT_S,)

    def share(self, form: str, make: Callable[[], Any]) -> Any:
        """Return what the first process makes; alone, what this one does.

        Parameters
        ----------
        form : str
            What is asked for. It must be the same in all processes.
        make : callable
            Finds the answer, in the first process alone.

        Raises
        ------
        CaptureError
            If another process asks for something else, such as a graph of another shape, or does
            not ask in time.
        """
        if _is_alone():
            return make()
        store, base = self._meet(form, b"")
        if distributed.get_rank() == 0:
            try:
                answer = make()
            except PoetModelError as error:
                store.set(f"{base}/answer", pickle.dumps((None, str(error))))
                raise
            store.set(f"{base}/answer", pickle.dumps((answer, None)))
            return answer
        store.wait([f"{base}/answer"], self._wait)
        answer, refusal = pickle.loads(store.get(f"{base}/answer"))  # noqa: S301 - of the same job
        if refusal is not None:
            raise CaptureError(refusal)
        return answer

    def gather(self, form: str, value: Any) -> list[Any]:
        """Return the values of all processes, by rank; alone, that of this one.

        Parameters
        ----------
        form : str
            Identifies the value. It must be the same in all processes.
        value : object
            Metric of this process, such as a measurement.

        Raises
        ------
        CaptureError
            As `share` does.
        """
        if _is_alone():
            return [value]
        store, base = self._meet(form, pickle.dumps(value))
        size = distributed.get_world_size()
        parts = [store.get(f"{base}/{rank}").partition(b"\n")[2] for rank in range(size)]
        return [pickle.loads(part) for part in parts]  # noqa: S301 - of the same job

    def _meet(self, form: str, value: bytes) -> tuple[distributed.Store, str]:
        """Wait for all processes to write their values; return the store, and the key of these."""
        if self._number is None:
            self._number = next(_BACKENDS)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - no other way
        base = f"poetmodel/{self._number}/{next(self._asked)}"
        own = digest(form).encode()
        store.set(f"{base}/{rank}", own + b"\n" + value)
        keys = [f"{base}/{other}" for other in range(size)]
        for other, key in enumerate(keys):
            try:
                store.wait([key], self._wait)
            except RuntimeError as error:
                raise CaptureError(
                    f"process {other} has not planned in {self._wait.total_seconds():.0f} s what "
                    f"process {rank} plans now: give all processes batches of the same shapes, "
                    "drop_last=True say, and let all of them compile the same calls"
                ) from error
        different = [r for r, key in enumerate(keys) if store.get(key).partition(b"\n")[0] != own]
        if different:
            others = ", ".join(map(str, different))
            raise CaptureError(
                f"process {rank} plans another graph than process {others}: shapes of inputs, "
                "models and versions must be the same in all processes; drop the last batch "
                "if it is smaller (drop_last=True), and pad to one length"
            )
        return store, base


def _is_alone() -> bool:
    return not distributed.is_initialized() or distributed.get_world_size() == 1
