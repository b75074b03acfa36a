"""Peak bytes of live tensors in PyTorch, as the simulator of plans counts them."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.graph.tensors import storage_key, tensors_in


def storage_peak_bytes(work, known):
    """Call `work`; return the peak bytes of its live tensors [B], without those of `known`."""
    with _StorageWatch(known) as watch:
        work()
    return watch.peak_bytes


class _StorageWatch(TorchDispatchMode):
    """Dispatch mode that counts the bytes of new storages until each is freed."""

    def __init__(self, known):
        super().__init__()
        self.bytes_of_storage = {storage_key(tensor): 0 for tensor in known}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call an operator; count the new storages of its results, and update the peak."""
        value = function(*args, **(kwargs or {}))
        for tensor in tensors_in(value):
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if key not in self.bytes_of_storage:
                self.bytes_of_storage[key] = storage.nbytes()
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._remove, key)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return value

    def _remove(self, key):
        self.live_bytes -= self.bytes_of_storage.pop(key)
