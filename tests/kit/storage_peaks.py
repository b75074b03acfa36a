"""Peak bytes of live tensors in PyTorch, as the simulator of plans counts them."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.graph.tensors import storage_key, tensors_in


def storage_peak_bytes(work, known):
    """Call `work`; return the peak bytes of live tensors, without the storages `known` [B]."""
    with _StorageWatch(known) as watch:
        work()
    return watch.highest


class _StorageWatch(TorchDispatchMode):
    """Dispatch mode that records each new storage and its release."""

    def __init__(self, known):
        super().__init__()
        self.alive = {storage_key(tensor): 0 for tensor in known}
        self.total = self.highest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call an operator; count the storages of its results."""
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
