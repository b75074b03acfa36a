"""Measured peaks of memory: of the tensors alone, and of the heap."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from poetmodel.torch.measures import storage_key, tensors_in
from poetmodel.torch.workspace import MEMORY, without_notices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


def heap_peak_bytes(work: Callable[[], object]) -> int:
    """Measure the highest total of what PyTorch allocates while something runs [B].

    Notes
    -----
    By the memory events of PyTorch's profiler: tensors and workspaces, less what is freed. What was
    there before does not count.
    """
    from torch.autograd.profiler import profile

    with without_notices(), profile(profile_memory=True) as recorded:
        work()
    events = recorded.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == MEMORY]
    running = highest = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        running += size
        highest = max(highest, running)
    return highest


def storage_peak_bytes(work: Callable[[], object], known: Iterable[torch.Tensor]) -> int:
    """Measure the highest total of tensors that are alive while something runs [B].

    Parameters
    ----------
    work : callable
        What runs.
    known : iterable of Tensor
        What was there before, and does not count.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        """Sees each new storage, and when it goes."""

        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, int] = {storage_key(tensor): 0 for tensor in known}
            self.total = self.highest = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            value = function(*args, **(kwargs or {}))
            for tensor in tensors_in(value):
                storage = tensor.untyped_storage()
                key = storage_key(tensor)
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    self.total += storage.nbytes()
                    weakref.finalize(storage, self.gone, key)
            self.highest = max(self.highest, self.total)
            return value

        def gone(self, key: int) -> None:
            """Count a storage no more."""
            self.total -= self.alive.pop(key)

    with Watch() as watch:
        work()
    return int(watch.highest)
