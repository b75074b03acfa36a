"""Tensors: identifiers of storages, tensors in containers, keys of calls, allocated memory."""

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
    """Return an identifier of a tensor's storage, unique among all storages that exist."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the only identity on every device
    return key


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    return tuple(leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def fake_value(node: fx.Node) -> Any:
    """Return the fake tensors that the capture predicts for a node's output, or None."""
    return node.meta.get("val")


def fake_storage_key(node: fx.Node) -> int | None:
    """Return the storage key of a node's fake tensor; None unless the output is one tensor."""
    value = fake_value(node)
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def call_key(*arguments: Any) -> Hashable:
    """Return a key of a call: equal for equal structure, types, shapes, strides and other values.

    Values of tensors do not count.
    """
    leaves, spec = _pytree.tree_flatten(arguments)
    return spec, tuple(
        (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset())
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), str(leaf))
        for leaf in leaves
    )


# -- memory ------------------------------------------------------------------------------------

_MEMORY: Final = "[memory]"
"""Name of the profiler's events of allocated and freed memory."""
_MARK: Final = "poetmodel: levels count from here"
"""Name of our profiler event that starts a section of `HeapWatch`."""
_NOTICE: Final = b"USDT:"
"""Prefix of the lines that the profiler writes to stderr on every start and stop."""


def heap_peak_bytes(work: Callable[[], object]) -> int:
    """Call `work`, and return the peak of the memory that PyTorch allocates during the call [B].

    Counts tensors and workspaces less freed memory, by the memory events of PyTorch's profiler.
    Memory that was allocated before the call does not count.

    Raises
    ------
    CaptureError
        If a profiler is already on: PyTorch has only one, which would lose its records.
    """
    watch = HeapWatch()
    try:
        work()
    finally:
        (levels,) = watch.end()
    return max(levels)


class HeapWatch:
    """Records PyTorch's allocations from its construction to `end`; raises as `heap_peak_bytes`."""

    def __init__(self) -> None:
        """Start PyTorch's profiler of memory events."""
        if profiler_is_on():
            raise CaptureError(
                "a profiler of PyTorch is on, and memory is measured with another one: compile, or "
                "run the compiled function once, before it begins"
            )
        self._recorded = profile(profile_memory=True)
        with _without_notices():
            self._recorded.__enter__()

    @staticmethod
    def start_section() -> None:
        """Start a section. Freed memory counts only if it was allocated during the watch."""
        with record_function(_MARK):
            pass

    def end(self) -> list[list[int]]:
        """Stop recording; return the running total of allocated less freed bytes per section [B].

        Each section begins with 0 and has one total per allocation or free.
        """
        with _without_notices():
            self._recorded.__exit__(None, None, None)
        events: list[tuple[int, int | None]] = [
            (event.start_ns(), event.nbytes() if event.name() == _MEMORY else None)
            for event in self._recorded.kineto_results.events()
            if event.name() in (_MEMORY, _MARK)
        ]
        events.sort(key=itemgetter(0))
        sections = [[0]]
        for _, size in events:
            if size is None:
                sections.append([0])
            else:
                sections[-1].append(sections[-1][-1] + size)
        return sections


def profiler_is_on() -> bool:
    """Return whether a profiler of PyTorch is on; PyTorch has only one at a time."""
    return bool(torch._C._autograd._profiler_enabled())  # noqa: SLF001 - no other way


@contextmanager
def _without_notices() -> Iterator[None]:
    """Context manager that buffers stderr; at the end writes it without the profiler's notices."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            buffer.seek(0)
            for line in buffer:
                if not line.startswith(_NOTICE):
                    os.write(2, line)
