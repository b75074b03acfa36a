"""Peers of compiled steps: eager PyTorch and its methods to save memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.state.pages import bytes_of
from pytorch.library import BLOCKS
from pytorch.networks import Block

if TYPE_CHECKING:
    from pytorch.networks import Training

Step = Callable[..., torch.Tensor]

SMALL_BYTES: Final = 4096
"""The file hook leaves smaller tensors in memory [B]."""
_ALIGNMENT_BYTES: Final = 4096


@dataclass(kw_only=True)
class TrainingMethod:
    """A method to execute a training step."""

    run: Step
    """Function that computes the gradients and returns the loss."""
    prepare: Callable[[], object] = lambda: None
    """Function to call after each step."""
    written_bytes: Callable[[], int] = lambda: 0
    """Function that returns the bytes written so far [B]."""
    details: dict[str, Any] = field(default_factory=dict)
    """Function that returns further record fields, such as those of the solve."""


def eager(training: Training) -> TrainingMethod:
    """Return the training method of eager PyTorch."""
    model, loss_fn, _ = training
    return _training_method(model, loss_fn)


# -- the file hook ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Page:
    """A saved tensor in the file: the offset of its storage, and its layout."""

    offset: int
    bytes: int
    layout: tuple[torch.dtype, torch.Size, tuple[int, ...]]


class FileHooks:
    """Hooks that write the tensors saved by autograd to a file, and read them at their use.

    A tensor that is saved by two operations is written once. Parameters, buffers, inputs and small
    tensors stay in memory. As in compiled steps, a write ends when the medium has the bytes, and
    the copy in the file cache is dropped.
    """

    def __init__(self, training: Training, folder: str) -> None:
        model, _, inputs = training
        self._there = {storage_key(t) for t in (*model.parameters(), *model.buffers(), *inputs)}
        self._descriptor, path = tempfile.mkstemp(dir=folder)
        Path(path).unlink()
        self._end = 0
        self._offsets: dict[tuple[int, ...], int] = {}
        """Where pages lie, by storage, version, first byte and size, while the storage lives."""
        self.written_bytes = 0

    def begin(self) -> None:
        """Begin a step: write from the beginning of the file again."""
        self._end = 0
        self._offsets.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Write a tensor unless it was written; return its page, or the tensor if not paged."""
        small = tensor.numel() * tensor.element_size() < SMALL_BYTES
        if small or storage_key(tensor) in self._there:
            return tensor
        data = tensor.detach()
        if not _is_dense(data):
            data = data.contiguous()
        first = data.storage_offset() * data.element_size()
        size = data.numel() * data.element_size()
        layout = (data.dtype, data.shape, data.stride())
        storage = data.untyped_storage()
        key = (storage_key(data), data._version, first, size)  # noqa: SLF001 - of the contents
        if key not in self._offsets:
            self._offsets[key] = self._write(bytes_of(storage)[first : first + size])
            weakref.finalize(storage, self._offsets.pop, key, None)
        return _Page(offset=self._offsets[key], bytes=size, layout=layout)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return a saved tensor, read from the file if it is a page."""
        if isinstance(saved, torch.Tensor):
            return saved
        storage = torch.UntypedStorage(saved.bytes)
        if os.preadv(self._descriptor, [bytes_of(storage)], saved.offset) != saved.bytes:
            msg = "a page could not be read"
            raise OSError(msg)
        self._drop(saved.offset, saved.bytes)
        dtype, shape, stride = saved.layout
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)

    def _write(self, page: memoryview) -> int:
        offset = self._end
        os.pwrite(self._descriptor, page, offset)
        os.fdatasync(self._descriptor)
        self._drop(offset, page.nbytes)
        self._end += -(-page.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.written_bytes += page.nbytes
        return offset

    def _drop(self, offset: int, size: int) -> None:
        os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill one range of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def hooks_to_file(training: Training, folder: str) -> TrainingMethod:
    """Return the method that writes each saved tensor to a file and reads it at its use."""
    model, loss_fn, _ = training
    hooks = FileHooks(training, folder)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hooks.begin()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            loss = loss_fn(model(x), y)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return, unused-ignore]

    return TrainingMethod(run=run, written_bytes=lambda: hooks.written_bytes)


# -- recomputation ---------------------------------------------------------------------------------

SAVED: Final = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 - its name
)
"""Operators whose results selective checkpointing saves."""


def checkpoint_per_block(training: Training, **options: Any) -> TrainingMethod:
    """Return the method that saves the inputs of blocks and recomputes blocks in backward."""
    model, loss_fn, _ = training
    blocks = [
        module
        for module in model.modules()
        if isinstance(module, Block) or type(module).__name__ in BLOCKS
    ]
    for block in blocks:
        block.forward = partial(  # type: ignore[method-assign, unused-ignore]
            checkpoint, block.forward, use_reentrant=False, **options
        )
    return replace(_training_method(model, loss_fn), details={"blocks": len(blocks)})


def selective_checkpoint(training: Training) -> TrainingMethod:
    """Return the method that also saves the results of `SAVED` and recomputes all others."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    make = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint_per_block(training, context_fn=make)


def memory_budget(training: Training, share: float) -> TrainingMethod:
    """Return the method of ``aot_eager`` with an ``activation_memory_budget``."""
    from torch._functorch import config

    model, loss_fn, _ = training
    config.activation_memory_budget = share
    return _training_method(torch.compile(model, backend="aot_eager"), loss_fn)


def stock(training: Training, share: float | None = None) -> TrainingMethod:
    """Return the method with Inductor's kernels, within a fraction of its estimated memory."""
    from torch._functorch import config

    if share is not None:
        config.activation_memory_budget = share
    return whole_loss(training, "inductor")


def whole_loss(training: Training, backend: Any) -> TrainingMethod:
    """Compile a function that calls model and loss.

    The function is new for each call, because PyTorch reuses compiled code of equal functions.
    """
    model, loss_fn, _ = training

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_fn(model(x), y)  # type: ignore[no-any-return, unused-ignore]

    loss_of.__code__ = loss_of.__code__.replace()
    compiled = torch.compile(loss_of, backend=backend, fullgraph=True, dynamic=False)
    return _training_method(lambda x: x, compiled)


def _training_method(
    forward: Callable[[torch.Tensor], torch.Tensor], loss_fn: Any
) -> TrainingMethod:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(forward(x), y)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return, unused-ignore]

    return TrainingMethod(run=run)
