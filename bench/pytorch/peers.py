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
"""Minimum size of tensors that are written to the file [B]."""
_ALIGNMENT_BYTES: Final = 4096


@dataclass(kw_only=True)
class TrainingMethod:
    """A method to execute a training step."""

    run: Step
    """Function that computes the gradients and returns the loss."""
    prepare: Callable[[], object] = lambda: None
    """Function to call after each timed step, such as one that removes gradients."""
    written_bytes: Callable[[], int] = lambda: 0
    """Function that returns the bytes written so far [B]."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further record fields, such as those of the solve."""


def make_eager(training: Training) -> TrainingMethod:
    """Return the method of eager PyTorch."""
    model, loss_fn, _ = training
    return _make_training_method(model, loss_fn)


# -- the file hook ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Page:
    """A saved tensor in the file: offset and size [B], and its dtype, shape and strides."""

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
        self._resident_keys = {
            storage_key(t) for t in (*model.parameters(), *model.buffers(), *inputs)
        }
        self._descriptor, path = tempfile.mkstemp(dir=folder)
        Path(path).unlink()
        self._end = 0
        self._offsets: dict[tuple[int, ...], int] = {}
        """Offset of each page in the file, by storage, version, first byte and size; removed when
        the storage is freed."""
        self.written_bytes = 0
        """Bytes written in all steps so far."""

    def begin_step(self) -> None:
        """Forget the pages of the last step, and write from the beginning of the file again."""
        self._end = 0
        self._offsets.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Write a tensor unless the file has it; return its page, or the tensor if not written."""
        is_small = tensor.numel() * tensor.element_size() < SMALL_BYTES
        if is_small or storage_key(tensor) in self._resident_keys:
            return tensor
        data = tensor.detach()
        if not _is_dense(data):
            data = data.contiguous()
        first_byte = data.storage_offset() * data.element_size()
        size_bytes = data.numel() * data.element_size()
        layout = (data.dtype, data.shape, data.stride())
        storage = data.untyped_storage()
        key = (storage_key(data), data._version, first_byte, size_bytes)  # noqa: SLF001 - not public
        if key not in self._offsets:
            self._offsets[key] = self._write(
                bytes_of(storage)[first_byte : first_byte + size_bytes]
            )
            weakref.finalize(storage, self._offsets.pop, key, None)
        return _Page(offset=self._offsets[key], bytes=size_bytes, layout=layout)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return a saved tensor, read from the file if it is a page.

        Raises OSError if the page cannot be read completely.
        """
        if isinstance(saved, torch.Tensor):
            return saved
        storage = torch.UntypedStorage(saved.bytes)
        if os.preadv(self._descriptor, [bytes_of(storage)], saved.offset) != saved.bytes:
            msg = "a page could not be read"
            raise OSError(msg)
        self._drop_from_cache(saved.offset, saved.bytes)
        dtype, shape, stride = saved.layout
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)

    def _write(self, page: memoryview) -> int:
        offset = self._end
        os.pwrite(self._descriptor, page, offset)
        os.fdatasync(self._descriptor)
        self._drop_from_cache(offset, page.nbytes)
        self._end += -(-page.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.written_bytes += page.nbytes
        return offset

    def _drop_from_cache(self, offset: int, size_bytes: int) -> None:
        os.posix_fadvise(self._descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill one range of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def make_file_hooks(training: Training, folder: str) -> TrainingMethod:
    """Return the method that writes each saved tensor to a file and reads it at its use."""
    model, loss_fn, _ = training
    hooks = FileHooks(training, folder)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hooks.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            loss = loss_fn(model(x), y)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return, unused-ignore]

    return TrainingMethod(run=run, written_bytes=lambda: hooks.written_bytes)


# -- recomputation ---------------------------------------------------------------------------------

SAVED_OPERATORS: Final = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 - name of the operator
)
"""Operators whose results selective checkpointing saves."""


def make_block_checkpoint(training: Training, **options: Any) -> TrainingMethod:
    """Return the method that saves the inputs of blocks and recomputes blocks in backward.

    Replaces ``forward`` of each block of the model. Options are those of PyTorch's ``checkpoint``.
    """
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
    return replace(_make_training_method(model, loss_fn), details={"blocks": len(blocks)})


def make_selective_checkpoint(training: Training) -> TrainingMethod:
    """Return the method that also saves the results of `SAVED_OPERATORS` in blocks.

    Replaces ``forward`` of each block of the model.
    """

    def choose_policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if op in SAVED_OPERATORS
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    make_contexts = partial(create_selective_checkpoint_contexts, choose_policy)
    return make_block_checkpoint(training, context_fn=make_contexts)


def make_memory_budget(training: Training, fraction: float) -> TrainingMethod:
    """Return the method of ``aot_eager`` with `fraction` as ``activation_memory_budget``.

    Sets this option of PyTorch for good.
    """
    from torch._functorch import config

    model, loss_fn, _ = training
    config.activation_memory_budget = fraction
    return _make_training_method(torch.compile(model, backend="aot_eager"), loss_fn)


def make_stock(training: Training, fraction: float | None = None) -> TrainingMethod:
    """Return the method with Inductor's kernels.

    If `fraction` is not None, sets PyTorch's option ``activation_memory_budget`` to it for good.
    """
    from torch._functorch import config

    if fraction is not None:
        config.activation_memory_budget = fraction
    return compile_whole_loss(training, "inductor")


def compile_whole_loss(training: Training, backend: Any) -> TrainingMethod:
    """Return the method that compiles model and loss as one function, at its first step.

    Each method has its own copy of the function's code, because PyTorch reuses compiled code.
    """
    model, loss_fn, _ = training

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_fn(model(x), y)  # type: ignore[no-any-return, unused-ignore]

    loss_of.__code__ = loss_of.__code__.replace()
    compiled = torch.compile(loss_of, backend=backend, fullgraph=True, dynamic=False)
    return _make_training_method(lambda x: x, compiled)


def _make_training_method(
    forward: Callable[[torch.Tensor], torch.Tensor], loss_fn: Any
) -> TrainingMethod:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(forward(x), y)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return, unused-ignore]

    return TrainingMethod(run=run)
