"""The highest total of tensors that are alive: what a plan's simulator counts."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.graph.tensors import storage_key, tensors_in


def storage_peak_bytes(work, known):
    """Return the highest total of tensors alive while something runs, but for `known` [B]."""
    with _StorageWatch(known) as watch:
        work()
    return watch.highest


class _StorageWatch(TorchDispatchMode):
    """Sees each new storage, and when it goes."""

    def __init__(self, known):
        super().__init__()
        self.alive = {storage_key(tensor): 0 for tensor in known}
        self.total = self.highest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count what an operator makes."""
        value = function(*args, **(kwargs or {}))
        for tensor in tensors_in(value):
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if key not in self.alive:
                self.alive[key] = storage.nbytes()
                self.total += storage.nbytes()
                weakref.finalize(storage, self._remove, key)
        self.highest = max(self.highest, self.total)
        return value

    def _remove(self, key):
        self.total -= self.alive.pop(key)
