"""Ways to train: eager PyTorch, what it offers to save memory, and compiled steps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from poetmodel import torch as pmt

if TYPE_CHECKING:
    from pytorch.networks import Training

Run = Callable[..., torch.Tensor]


@dataclass(kw_only=True)
class Method:
    """One way to run a training step."""

    run: Run
    """Fills the gradients; returns the loss."""
    written_bytes: Callable[[], int]
    """Returns how much it has written so far [B]."""
    details: dict[str, Any]
    """What else there is to say: the solve, for compiled steps."""


def nothing() -> int:
    """Return 0: this method writes nothing."""
    return 0


def eager(training: Training) -> Method:
    """Run as PyTorch does."""
    model, loss_fn, _ = training
    return _of(model, loss_fn)


def hooks_to_file(training: Training, folder: str) -> Method:
    """Write every saved tensor to a file when it is saved, and read it back when it is used."""
    model, loss_fn, _ = training
    kept = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    descriptor, path = tempfile.mkstemp(dir=folder)
    Path(path).unlink()
    place = {"end": 0, "written": 0}

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in kept or not tensor.numel():
            return tensor
        data = tensor.detach().contiguous()
        page = memoryview(data.view(torch.uint8).numpy()) if data.ndim else None
        if page is None:
            return tensor
        offset = place["end"]
        os.pwrite(descriptor, page, offset)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, offset, page.nbytes, os.POSIX_FADV_DONTNEED)
        place["end"] = -(-(offset + page.nbytes) // 4096) * 4096
        place["written"] += page.nbytes
        return (offset, data.shape, data.dtype, tensor.stride())

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        offset, shape, dtype, stride = saved
        data = torch.empty(shape, dtype=dtype)
        os.preadv(descriptor, [memoryview(data.view(torch.uint8).numpy())], offset)
        return data if data.stride() == stride else torch.empty_strided(
            shape, stride, dtype=dtype
        ).copy_(data)  # fmt: skip

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        place["end"] = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = loss_fn(model(x), y)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return, unused-ignore]

    return Method(run=run, written_bytes=lambda: place["written"], details={})


def checkpoint_per_block(training: Training) -> Method:
    """Keep what goes in and out of the parts of the network; compute each part again."""
    model, loss_fn, _ = training

    def forward(x: torch.Tensor) -> torch.Tensor:
        for part in model:
            x = checkpoint(part, x, use_reentrant=False)
        return x

    return _of(forward, loss_fn)


_SAVED: Final = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
)


def selective_checkpoint(training: Training) -> Method:
    """Keep convolutions and matrix products; compute all else again."""
    model, loss_fn, _ = training

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        saved = op in _SAVED
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            model, x, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip

    return _of(forward, loss_fn)


def memory_budget(training: Training, share: float) -> Method:
    """Let ``torch.compile`` choose what to save by its ``activation_memory_budget``."""
    from torch._functorch import config

    model, loss_fn, _ = training
    config.activation_memory_budget = share
    return _of(torch.compile(model, backend="aot_eager"), loss_fn)


def ours(
    training: Training, folder: str, share: float, *, paging: bool, recompute: bool, limit_s: float
) -> Method:
    """Compile a step that keeps the budget."""
    model, loss_fn, inputs = training
    step = pmt.compile(
        model, loss_fn, inputs, ram=f"{share:.0%}", storage=folder, paging=paging,
        recompute=recompute, time_limit=limit_s, rollback=False,
    )  # fmt: skip
    compiled = step.compiled
    result = step.result
    return Method(
        run=step,
        written_bytes=lambda: compiled.runner.traffic.written_bytes,
        details={
            "budget_bytes": step.budget_bytes,
            "plan_peak_bytes": compiled.peak_bytes,
            "plan_time_s": compiled.check.makespan_s,
            "status": str(result.status),
            "gap": result.gap,
            "solve_s": result.build_s + result.solve_s,
            "compile_s": compiled.compile_s,
        },
    )


def make(name: str, training: Training, folder: str, share: float, limit_s: float) -> Method:
    """Return a method by name.

    Parameters
    ----------
    name : str
        One of `METHODS`.
    training : tuple
        Model, loss function and inputs.
    folder : str
        Where pages lie.
    share : float
        The budget as a share of the peak of keeping everything, for methods that take one.
    limit_s : float
        Most time for the solver [s].
    """
    both = {"both": (True, True), "recompute": (False, True), "paging": (True, False)}
    if name in both:
        paging, recompute = both[name]
        return ours(training, folder, share, paging=paging, recompute=recompute, limit_s=limit_s)
    if name == "file-hooks":
        return hooks_to_file(training, folder)
    if name == "memory-budget":
        return memory_budget(training, share)
    plain = {
        "eager": eager,
        "checkpoint": checkpoint_per_block,
        "selective": selective_checkpoint,
    }
    return plain[name](training)


METHODS: Final = (
    "eager", "both", "recompute", "paging", "file-hooks", "checkpoint", "selective",
    "memory-budget",
)  # fmt: skip
"""Names of all methods; the first is what the others are compared with."""
BUDGETED: Final = ("both", "recompute", "paging", "memory-budget")
"""Those that take a budget."""


def _of(forward: Callable[[torch.Tensor], torch.Tensor], loss_fn: Any) -> Method:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(forward(x), y)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return, unused-ignore]

    return Method(run=run, written_bytes=nothing, details={})
