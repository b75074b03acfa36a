"""Tensors: identity of storages, tensors in nests, forms of calls, what the allocator gives."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.profiler import profile, record_function
from torch.utils import _pytree

from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import fx


def storage_key(tensor: torch.Tensor) -> int:
    """Return an identifier of one storage among all that are alive."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the only identity on every device
    return key


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in a nest of tuples, lists and dicts, in order."""
    return tuple(leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def fake(node: fx.Node) -> Any:
    """Return the output of a node, without its memory, as the capture predicts it."""
    return node.meta.get("val")


def storage_of(node: fx.Node) -> int | None:
    """Return the key of the storage that a node shows; None where it is no tensor, or several."""
    value = fake(node)
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def form_of(*given: Any) -> Hashable:
    """Return a key that is equal for calls that do the same work on other values."""
    leaves, spec = _pytree.tree_flatten(given)
    return spec, tuple(
        (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset())
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), str(leaf))
        for leaf in leaves
    )


# -- memory ------------------------------------------------------------------------------------

_MEMORY: Final = "[memory]"
"""Name of the events that tell of memory taken and given back."""
_MARK: Final = "poetmodel: levels count from here"
"""Name of an event of our own."""
_NOTICE: Final = b"USDT:"
"""How lines begin that the profiler writes to stderr on every start and stop."""


def heap_peak_bytes(work: Callable[[], object]) -> int:
    """Measure the highest total of what PyTorch allocates while something runs [B].

    By the memory events of PyTorch's profiler: tensors and workspaces, less what is freed. What was
    there before does not count.

    Raises
    ------
    CaptureError
        If a profiler is on already: PyTorch has one at a time, and would drop what that has seen.
    """
    watch = HeapWatch()
    try:
        work()
    finally:
        (levels,) = watch.end()
    return max(levels)


class HeapWatch:
    """What PyTorch allocates and frees from here to `end`; raises as `heap_peak_bytes` does."""

    def __init__(self) -> None:
        if profiler_is_on():
            raise CaptureError(
                "a profiler of PyTorch is on, and memory is measured with another one: compile, or "
                "run the compiled function once, before it begins"
            )
        self._recorded = profile(profile_memory=True)
        with _without_notices():
            self._recorded.__enter__()

    @staticmethod
    def mark() -> None:
        """Begin another part. What was there before the watch is not seen when it goes."""
        with record_function(_MARK):
            pass

    def end(self) -> list[list[int]]:
        """Return for each part how much more there was than when it began, 0 first [B]."""
        with _without_notices():
            self._recorded.__exit__(None, None, None)
        changes: list[tuple[int, int | None]] = [
            (event.start_ns(), event.nbytes() if event.name() == _MEMORY else None)
            for event in self._recorded.kineto_results.events()
            if event.name() in (_MEMORY, _MARK)
        ]
        changes.sort(key=itemgetter(0))
        parts = [[0]]
        for _, size in changes:
            if size is None:
                parts.append([0])
            else:
                parts[-1].append(parts[-1][-1] + size)
        return parts


def profiler_is_on() -> bool:
    """Return whether a profiler of PyTorch is on, which has one at a time."""
    return bool(torch._C._autograd._profiler_enabled())  # noqa: SLF001 - no other way


@contextmanager
def _without_notices() -> Iterator[None]:
    """Leave the profiler's notices out of stderr; all else that is written there gets through."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if not line.startswith(_NOTICE):
                    os.write(2, line)
