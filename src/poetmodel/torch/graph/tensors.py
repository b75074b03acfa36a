"""Tensors: identifiers of storages, tensors in containers, keys of calls, allocated memory."""

from __future__ import annotations

import os
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.profiler import profile, record_function
from torch.utils import _pytree

from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import fx


def storage_key(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage, unique among all storages that exist."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the only identity on every device
    return key


def to_meta(value: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the layout of a tensor."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in nested tuples, lists and dicts, in the order of the items."""
    return tuple(leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def fake_value(node: fx.Node) -> Any:
    """Return the predicted output of a node: fake tensors or numbers; None if there is none."""
    return node.meta.get("val")


def fake_storage_key(node: fx.Node) -> int | None:
    """Return the storage key of a node's fake tensor; None unless the output is one tensor."""
    value = fake_value(node)
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def call_key(*arguments: Any) -> Hashable:
    """Return the key of a call: the structure of its arguments, and a key for each value.

    That of a tensor has dtype, shape, strides and offset, of other values class and text.
    """
    leaves, spec = _pytree.tree_flatten(arguments)
    return spec, tuple(
        (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset())
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), str(leaf))
        for leaf in leaves
    )


# -- memory ------------------------------------------------------------------------------------

_MEMORY_EVENT: Final = "[memory]"
"""Name of the profiler's events of allocated and freed memory."""
_SECTION_MARK: Final = "poetmodel: levels count from here"
"""Name of the event in the profiler that starts a section of `HeapWatch`."""
_NO_NOTICES: Final = ("KINETO_LOG_LEVEL", "99")
"""Without this variable, the profiler writes a line to stderr on every start and stop. It is read
once, by the first profiler of the process."""
_INTERRUPTS: Final[dict[int, Callable[[], object]]] = {}
"""Functions that end running measurements which may be repeated, by the id of their `HeapWatch`."""


def heap_peak_bytes(work: Callable[[], object]) -> int:
    """Call `work`, and return the peak of the memory that PyTorch allocates during the call [B].

    Counts allocated minus freed bytes; memory from before the call counts negatively when freed.
    Raises `CaptureError` if a profiler is already on: PyTorch has only one.
    """
    watch = HeapWatch()
    try:
        work()
    finally:
        (levels,) = watch.end()
    return max(levels)


class HeapWatch:
    """Records PyTorch's allocations until `end`; a later measurement first calls `interrupt`.

    `interrupt` ends and forgets the measurement. Raises `CaptureError` if another profiler is
    already on.
    """

    def __init__(self, interrupt: Callable[[], object] | None = None) -> None:
        interrupt_measurements()
        if is_profiler_on():
            raise CaptureError(
                "a profiler of PyTorch is on, and memory is measured with another one: compile, or "
                "run the compiled function once, before it begins"
            )
        os.environ.setdefault(*_NO_NOTICES)
        self._profiler = profile(profile_memory=True)
        self._profiler.__enter__()
        if interrupt is not None:
            _INTERRUPTS[id(self)] = interrupt

    @staticmethod
    def start_section() -> None:
        """Start a section, whose totals count from 0 again."""
        with record_function(_SECTION_MARK):
            pass

    def end(self) -> list[list[int]]:
        """Stop recording; return a list of totals of allocated minus freed bytes per section [B].

        The first section begins at construction, each further one at a `start_section`. The list of
        a section begins with 0, followed by the total after each allocation or free.
        """
        _INTERRUPTS.pop(id(self), None)
        self._profiler.__exit__(None, None, None)
        events: list[tuple[int, int | None]] = [
            (event.start_ns(), event.nbytes() if event.name() == _MEMORY_EVENT else None)
            for event in self._profiler.kineto_results.events()
            if event.name() in (_MEMORY_EVENT, _SECTION_MARK)
        ]
        events.sort(key=itemgetter(0))
        sections = [[0]]
        for _, size in events:
            if size is None:
                sections.append([0])
            else:
                sections[-1].append(sections[-1][-1] + size)
        return sections


def interrupt_measurements() -> None:
    """End the running measurements that give way to others."""
    for interrupt in tuple(_INTERRUPTS.values()):
        interrupt()


def is_profiler_on() -> bool:
    """Return whether a profiler of PyTorch is on; PyTorch has only one at a time."""
    return bool(torch._C._autograd._profiler_enabled())  # noqa: SLF001 - no other way
