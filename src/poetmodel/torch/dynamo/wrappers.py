"""DDP and FSDP2 around models: detection, bytes, and advice on compiling inside of them."""

# ruff: noqa: SLF001 - PyTorch has no public interface for the state of DDP and FSDP2

from __future__ import annotations

import gc
import sys
from importlib import import_module
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._dynamo import OptimizedModule, utils
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import Unsupported
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

_DDP_OPTIMIZER: Final = "ddp_optimizer"
"""The mode in which Dynamo creates one graph per bucket of DDP."""
_DDP_ADVICE: Final = (
    "DistributedDataParallel cannot be captured: compile the module inside, then wrap it: "
    "DistributedDataParallel(torch.compile(model, fullgraph=True, dynamic=False, ...)), with "
    "torch._dynamo.config.optimize_ddp = False"
)
_SHARDED_ADVICE: Final = (
    "a module that fully_shard wraps cannot be captured as a submodule: compile the module "
    "that contains the blocks, then wrap that module alone: "
    "model.compile(fullgraph=True, dynamic=False, ...), then fully_shard(model)"
)
_ADVICE_BY_PATH: Final = {
    "torch/nn/parallel/distributed.py": _DDP_ADVICE,
    "torch/distributed/fsdp/_fully_shard/": _SHARDED_ADVICE,
}
"""Advice, by a substring of the path of PyTorch's code that Dynamo failed to capture."""
FSDP: Final = "torch.distributed.fsdp"
"""Python module of FSDP2."""
_MAX_DEPTH: Final = 20
"""Maximum number of modules from a module up to the root of its model."""
_BACKEND_ATTRIBUTES: Final = ("_torchdynamo_orig_backend", "compiler_fn")
"""Attributes of PyTorch's wrappers that hold a back end."""


def has_ddp_buckets() -> bool:
    """Return whether Dynamo creates one graph per bucket of the DDP module being executed."""
    return active_ddp() is not None and utils.get_optimize_ddp_mode() == _DDP_OPTIMIZER


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP module whose forward pass is being executed; None without one."""
    module: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return module


def bucket_bytes(module: DistributedDataParallel) -> int:
    """Return the bytes of DDP's buckets: those of all parameters that require a gradient [B]."""
    return sum(
        parameter.nbytes for parameter in module.module.parameters() if parameter.requires_grad
    )


def find_sharded_parents(value: object) -> list[torch.nn.Module]:
    """Return the modules that FSDP2 shards and that are or contain `value`, if any."""
    if not isinstance(value, torch.nn.Module) or FSDP not in sys.modules:
        return []
    kind = sys.modules[FSDP].FSDPModule
    states = import_module("torch.distributed._composable_state")._module_state_mapping
    sharded_modules = (module for module in list(states) if isinstance(module, kind))
    return [
        module
        for module in sharded_modules
        if any(value is submodule for submodule in module.modules())
    ]


def gathered_bytes(modules: Iterable[torch.nn.Module], excluded_keys: Container[int]) -> int:
    """Return the current bytes of FSDP2, except sharded parameters, in the models of `modules` [B].

    A model has one root of FSDP2. A storage counts once, unless its key is in `excluded_keys`.
    """
    storages: dict[int, int] = {}
    for state in _fsdp_states(modules):
        for value in (*_communicated_tensors(state), *_state_gradients(state)):
            if isinstance(value, torch.Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                if storage._cdata not in excluded_keys:
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def fsdp_gradients(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the local gradients that FSDP2 holds in the models of `modules`, sharded or not."""
    gradients = (value for state in _fsdp_states(modules) for value in _state_gradients(state))
    return [getattr(value, "_local_tensor", value) for value in gradients if value is not None]


def fsdp_modes(modules: Iterable[torch.nn.Module]) -> tuple[tuple[bool, ...], ...]:
    """Return for each group of parameters whether gradients are reduced, and parameters gathered.

    Steps that differ in them (``set_requires_gradient_sync(False)``) differ in bytes of FSDP2.
    """
    return tuple(
        (group.reduce_grads, group.reshard_after_backward, group.is_unsharded)
        for state in _fsdp_states(modules)
        for group in state._fsdp_param_groups
    )


def _fsdp_states(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return FSDP2's states of all modules in the models of `modules`, in the models' order.

    The order of the `modules` of one model does not matter: modes are compared by position.
    """
    module_states = [module._get_fsdp_state() for module in modules]
    states = {
        id(state): state
        for module_state in module_states
        for state in (*module_state._state_ctx.all_states, module_state)
    }
    return list(states.values())


def _communicated_tensors(state: Any) -> Iterator[Any]:
    """Yield gathered parameters and buffers of a module's state, maybe None or twice."""
    communication = state._comm_ctx
    if (gather_state := getattr(communication, "all_gather_state", None)) is not None:
        yield gather_state.all_gather_result.all_gather_output
    for reduce_state in getattr(communication, "reduce_scatter_states", ()):
        yield reduce_state.reduce_scatter_input
    for group in state._fsdp_param_groups:
        yield getattr(group._all_gather_result, "all_gather_output", None)
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs


def _state_gradients(state: Any) -> Iterator[Any]:
    """Yield the gradients of a module's state, maybe None."""
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            yield parameter.sharded_param.grad
            yield getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            yield parameter.unsharded_accumulated_grad


def has_other_compiled_modules(module: torch.nn.Module) -> bool:
    """Return whether the model around `module` has another compiled module, not a parent."""
    modules = [value for value in gc.get_objects() if issubclass(type(value), torch.nn.Module)]
    parents = {id(child): parent for parent in modules for child in parent._modules.values()}
    root, parent_ids = module, {id(module)}
    for _ in range(_MAX_DEPTH):
        root = parents.get(id(root), root)
        if _is_compiled(root):
            parent_ids.add(id(root))
    if root is module:
        return False
    return any(
        id(submodule) not in parent_ids and _is_compiled(submodule) for submodule in root.modules()
    )


def _is_compiled(module: torch.nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def wrapper_advice(*, is_sharded: bool) -> str | None:
    """Return advice for an active DDP module, else for FSDP2 if `is_sharded`, else None."""
    if active_ddp() is not None:
        return _DDP_ADVICE
    return _SHARDED_ADVICE if is_sharded else None


def register_wrapper_advice(find_recorder: Callable[[Any], Callable[[str], object] | None]) -> None:
    """Register a callback that adds advice if Dynamo cannot capture DDP or FSDP2.

    PyTorch calls no back end then. `find_recorder` returns a back end's recorder; None if foreign.
    """

    def prepend_advice(_: object) -> None:
        """Record advice and prepend it to the current error, if DDP or FSDP2 caused that error."""
        error = sys.exc_info()[1]
        if not isinstance(error, Unsupported):
            return
        backend = _find_backend(error)
        record = None if backend is None else find_recorder(backend)
        if record is None:
            return
        frames = [frame.filename.replace("\\", "/") for frame in error.real_stack or ()]
        for path, advice in _ADVICE_BY_PATH.items():
            if any(path in frame for frame in frames):
                record(advice)
                error.args = (f"{advice}\n\n{error.args[0]}", *error.args[1:])
                return

    prepend_advice.__qualname__ = register_wrapper_advice.__qualname__
    callbacks = callback_handler.end_callbacks
    if not any(
        getattr(callback, "__qualname__", "") == prepend_advice.__qualname__
        for callback in callbacks
    ):
        callback_handler.register_end_callback(prepend_advice)


def _find_backend(error: BaseException) -> Any:
    """Return the back end of a failed compilation, without wrappers; None if it is unknown."""
    for frame, _ in walk_tb(error.__traceback__):
        backend = frame.f_locals.get("compiler_fn")
        while backend is not None:
            candidates = [getattr(backend, name, None) for name in _BACKEND_ATTRIBUTES]
            inner_backend = next((value for value in candidates if value is not None), None)
            if inner_backend is None:
                return backend
            backend = inner_backend
    return None
