"""Recognize models that DDP or FSDP2 wraps, and say how a model is compiled inside of them."""

from __future__ import annotations

import sys
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final

from torch._dynamo import utils
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import Unsupported
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

_DDP_OPTIMIZER: Final = "ddp_optimizer"
"""The mode in which Dynamo splits a model into the buckets of DDP."""
_DDP: Final = (
    "DistributedDataParallel cannot be captured: compile the module inside, then wrap it: "
    "DistributedDataParallel(torch.compile(model, fullgraph=True, dynamic=False, ...)), with "
    "torch._dynamo.config.optimize_ddp = False"
)
_SHARDED: Final = (
    "a module that fully_shard wraps cannot be captured as a part of another: compile the module "
    "that holds the blocks, then wrap that module alone: "
    "model.compile(fullgraph=True, dynamic=False, ...), then fully_shard(model)"
)
_ADVICE: Final = {
    "torch/nn/parallel/distributed.py": _DDP,
    "torch/distributed/fsdp/_fully_shard/": _SHARDED,
}
"""What to do, by the path of PyTorch's code that Dynamo failed to capture."""
_BACKEND: Final = ("_torchdynamo_orig_backend", "compiler_fn")
"""Attributes by which PyTorch's wrappers of a back end hold it."""


def has_ddp_buckets() -> bool:
    """Return whether Dynamo makes a graph for each bucket of the DDP module that runs now."""
    return _is_in_ddp() and utils.get_optimize_ddp_mode() == _DDP_OPTIMIZER


def is_sharded(value: object) -> bool:
    """Return whether a value is a module whose parameters FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(value, kind)


def wrapper_advice(*, is_sharded: bool) -> str | None:
    """Return how a module is compiled within the wrapper that runs now; None without a wrapper."""
    if _is_in_ddp():
        return _DDP
    return _SHARDED if is_sharded else None


def add_wrapper_advice(refuse: Callable[[Any], Callable[[str], object] | None]) -> None:
    """Put the advice before Dynamo's error where it fails to capture a wrapper.

    PyTorch calls no back end then: a callback at the end of each compilation changes the error.
    ``torch._dynamo.reset()`` removes it.

    Parameters
    ----------
    refuse : callable
        Takes the back end, and returns what takes the advice; None if it is another's.
    """

    def explain(_: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, Unsupported):
            return
        backend = _backend_of(error)
        take = None if backend is None else refuse(backend)
        if take is None:
            return
        frames = [frame.filename.replace("\\", "/") for frame in error.real_stack or ()]
        for path, advice in _ADVICE.items():
            if any(path in frame for frame in frames):
                take(advice)
                error.args = (f"{advice}\n\n{error.args[0]}", *error.args[1:])
                return

    explain.__qualname__ = add_wrapper_advice.__qualname__
    known = callback_handler.end_callbacks
    if not any(getattr(call, "__qualname__", "") == explain.__qualname__ for call in known):
        callback_handler.register_end_callback(explain)


def _is_in_ddp() -> bool:
    return DistributedDataParallel._get_active_ddp_module() is not None  # noqa: SLF001 - as Dynamo


def _backend_of(error: BaseException) -> Any:
    """Return the back end of the compilation that failed; None if no frame has it."""
    for frame, _ in walk_tb(error.__traceback__):
        backend = frame.f_locals.get("compiler_fn")
        while backend is not None:
            inner = [getattr(backend, name, None) for name in _BACKEND]
            found = next((value for value in inner if value is not None), None)
            if found is None:
                return backend
            backend = found
    return None
