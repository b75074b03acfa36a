"""Ways to train: eager PyTorch and what it offers to save memory."""

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
    """One way to run a training step."""

    run: Step
    """Fills the gradients; returns the loss."""
    prepare: Callable[[], object] = lambda: None
    """What follows each step."""
    written_bytes: Callable[[], int] = lambda: 0
    """Returns how much it has written so far [B]."""
    details: dict[str, Any] = field(default_factory=dict)
    """What else there is to say: the solve, for compiled steps."""


def eager(training: Training) -> TrainingMethod:
    """Run as PyTorch does."""
    model, loss_fn, _ = training
    return _training_method(model, loss_fn)


# -- the file hook ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Page:
    """A saved tensor in the file: where its memory lies there, and how the tensor lies in it."""

    offset: int
    bytes: int
    layout: tuple[torch.dtype, torch.Size, tuple[int, ...]]


class FileHooks:
    """Writes what autograd saves to a file, once, and reads it back when it is used.

    A tensor that is saved by two operations is written once. Parameters, buffers, inputs and small
    tensors stay where they are. As in compiled steps, a write ends when the medium has the bytes,
    and the copy in the file cache is dropped.
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
        """Begin a step, at the beginning of the file."""
        self._end = 0
        self._offsets.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Write a tensor; return what it is made of again."""
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
        """Return a saved tensor."""
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
    """Write every saved tensor to a file when it is saved, and read it back when it is used."""
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
"""What selective checkpointing keeps: convolutions, matrix products and attention."""


def checkpoint_per_block(training: Training, **options: Any) -> TrainingMethod:
    """Keep what goes into and out of each block; recompute the block in the backward pass."""
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
    """Keep convolutions, matrix products and attention too; recompute all else of a block."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    make = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint_per_block(training, context_fn=make)


def memory_budget(training: Training, share: float) -> TrainingMethod:
    """Let ``torch.compile`` choose what to save by its ``activation_memory_budget``."""
    from torch._functorch import config

    model, loss_fn, _ = training
    config.activation_memory_budget = share
    return _training_method(torch.compile(model, backend="aot_eager"), loss_fn)


def stock(training: Training, share: float | None = None) -> TrainingMethod:
    """Let Inductor write the kernels, within a share of the memory that it estimates."""
    from torch._functorch import config

    if share is not None:
        config.activation_memory_budget = share
    return whole_loss(training, "inductor")


def whole_loss(training: Training, backend: Any) -> TrainingMethod:
    """Compile the function that returns the loss, model and all.

    Each is a program of its own: PyTorch would run what it compiled of the same code before.
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
