"""Pages of compiled graphs: operators that write and read a file of slots.

Steps may overlap, so each page is written to a free slot instead of a fixed one. Its token, a
tensor of 8 bytes with the process and the slot, is saved by autograd; the slot is freed when the
token is deleted.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING, Final

import torch

from poetmodel.torch.graph.profiles import TensorLayout
from poetmodel.torch.state.pages import ALIGNMENT_BYTES, ScratchFile, Slot, bytes_of

if TYPE_CHECKING:
    from pathlib import Path

_NUMBERS: Final = count()
_STORE_BY_NUMBER: Final[weakref.WeakValueDictionary[int, PageStore]] = weakref.WeakValueDictionary()
"""Existing stores; operators of a graph have the number as an argument."""
_MAX_SLOTS: Final = 1 << 40
"""A token is the process ID times this number, plus the file offset divided by the alignment."""


class PageStore:
    """The pages of a back end: a file, and how the tensor of each page lies in its storage."""

    def __init__(self, folder: str | Path) -> None:
        self.file = ScratchFile(folder)
        self.layouts: dict[Slot, tuple[int, TensorLayout]] = {}
        """Storage bytes of the tensor in each slot, and its layout there."""
        self.number = next(_NUMBERS)
        _STORE_BY_NUMBER[self.number] = self


def page_out(tensor: torch.Tensor, store_number: int) -> torch.Tensor:
    """Write a storage to the store; return the slot's token, whose deletion frees the slot."""
    store, size = _STORE_BY_NUMBER[store_number], tensor.untyped_storage().nbytes()
    slot = store.file.write(bytes_of(tensor.untyped_storage()))
    store.layouts[slot] = size, TensorLayout.from_tensor(tensor)
    number = slot.process * _MAX_SLOTS + slot.offset // ALIGNMENT_BYTES
    token = torch.tensor([number], device="cpu")
    finalizer = weakref.finalize(token.untyped_storage(), store.file.free, slot, size)
    finalizer.atexit = False
    return token


def page_in(token: torch.Tensor, store_number: int) -> torch.Tensor:
    """Read the tensor in the token's slot into new memory, with its original strides.

    They may differ from those that PyTorch predicts, because kernels choose them.
    """
    store = _STORE_BY_NUMBER[store_number]
    process, position = divmod(int(token), _MAX_SLOTS)
    slot = Slot(process, position * ALIGNMENT_BYTES)
    size, layout = store.layouts[slot]
    storage = torch.UntypedStorage(size)
    store.file.read(slot, bytes_of(storage))
    return layout.tensor_in(storage)
