"""What a step must be so that it can be captured and replayed, checked before and after."""

from __future__ import annotations

import inspect
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import shown
from poetmodel.torch.annotation import in_module
from poetmodel.torch.batches import flatten, takes_keywords
from poetmodel.torch.failures import CaptureError
from poetmodel.torch.measures import tensors_in
from poetmodel.torch.roles import Purpose

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from poetmodel.torch.joint import Joint


def check_step(
    name: str,
    model: torch.nn.Module,
    loss_fn: object,
    inputs: Sequence[Any],
) -> None:
    """Check what is to be captured, as far as that can be told without running it.

    Parameters
    ----------
    name : str
        What messages call the step.
    model, loss_fn, inputs
        As for `capture`.

    Raises
    ------
    CaptureError
        If something is not what it should be.
    """
    import torch

    if not torch.is_grad_enabled():
        msg = f"{name}: gradients are off (torch.no_grad): capture a training step outside of it"
        raise CaptureError(msg)
    _check_model(name, model)
    if loss_fn is not None and not callable(loss_fn):
        msg = f"{name}: loss_fn: expected a function or None, got {shown(loss_fn)}"
        raise CaptureError(msg)
    if _is_compiled(loss_fn):
        msg = f"{name}: loss_fn is compiled (torch.compile); give the function that it was made of"
        raise CaptureError(msg)
    check_inputs(name, inputs)
    lazy = torch.nn.parameter.is_lazy
    missing = [path for path, parameter in model.named_parameters() if lazy(parameter)]
    missing += [path for path, buffer in model.named_buffers() if lazy(buffer)]
    if missing:
        msg = (
            f"{name}: {missing[0]} has no shape yet, as in every lazy module; "
            "call the model once on inputs first"
        )
        raise CaptureError(msg)
    _check_call(name, model, inputs if loss_fn is None else inputs[:-1], alone=loss_fn is None)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        msg = f"{name}: no parameter requires a gradient, so there is nothing to train"
        raise CaptureError(msg)


def _check_model(name: str, model: object) -> None:
    """Raise where a model is none, or another one wrapped."""
    import torch

    if not isinstance(model, torch.nn.Module):
        msg = f"{name}: expected a torch.nn.Module, got a {type(model).__name__}"
        raise CaptureError(msg)
    for path, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        where = f"module {path!r} is" if path else "the model is"
        wrapped = "OptimizedModule" in kinds
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            msg = (
                f"{name}: {where} compiled (torch.compile), and its operations cannot be captured; "
                "give the module that it was made of"
                + (" (model._orig_mod)" if wrapped else ", not compiled")
            )
            raise CaptureError(msg)
        if _is_compiled(module.forward):
            msg = (
                f"{name}: forward of {path or 'the model'} is compiled (torch.compile), and its "
                "operations cannot be captured; give a module whose forward is not compiled"
            )
            raise CaptureError(msg)
        if not set(_PARALLEL).isdisjoint(kinds):
            msg = (
                f"{name}: {where} a {kinds[0]}, which a compiled step cannot keep in step with its "
                "replicas; give the module inside (model.module), and average gradients after the "
                "step"
            )
            raise CaptureError(msg)
        if isinstance(module, torch.jit.ScriptModule):
            msg = f"{name}: {where} scripted (torch.jit); give the module that it was made of"
            raise CaptureError(msg)


def _is_compiled(function: object) -> bool:
    """Return whether a function was compiled, and not kept from it (``torch.compiler.disable``)."""
    made_of = hasattr(function, "_torchdynamo_orig_callable")
    return made_of and not getattr(function, "_torchdynamo_disable", False)


_PARALLEL: Final = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
)


def check_inputs(name: str, inputs: object) -> None:
    """Raise `CaptureError` if inputs are no tuple of something that a step can take."""
    import torch

    if not isinstance(inputs, tuple | list):
        msg = (
            f"{name}: inputs: expected a tuple such as (x, y), the target last, "
            f"got a {type(inputs).__name__}"
        )
        raise CaptureError(msg)
    if len(inputs) == 0:
        msg = f"{name}: expected inputs (the target last), got none"
        raise CaptureError(msg)
    for place, value in enumerate(flatten(inputs)[0]):
        if getattr(value, "layout", torch.strided) != torch.strided:
            msg = f"{name}: inputs[{place}]: expected a dense tensor, got {value.layout}"
            raise CaptureError(msg)
        if type(value).__module__ == "numpy":
            msg = (
                f"{name}: inputs[{place}]: expected a tensor, got a {type(value).__name__} of "
                "numpy; convert it with torch.as_tensor"
            )
            raise CaptureError(msg)
        if not isinstance(value, (torch.Tensor, str, int, float, NoneType)):
            msg = (
                f"{name}: inputs[{place}]: expected a tensor, got a {type(value).__name__}; give "
                "the tensors that it holds, in a tuple, list or mapping"
            )
            raise CaptureError(msg)


def _check_call(name: str, model: torch.nn.Module, given: Sequence[Any], *, alone: bool) -> None:
    """Raise where the model does not take as many inputs as it is to be called with."""
    if model._forward_pre_hooks:  # noqa: SLF001 - they may change what the model gets
        return
    try:
        called = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        if takes_keywords(model, given):
            called.bind(**given[0])
        else:
            called.bind(*given)
    except TypeError as error:
        role = (
            "without a loss_fn, the model gets all of them and returns the loss"
            if alone
            else "the model gets all but the last one, which is the target"
        )
        msg = (
            f"{name}: inputs: forward{called} cannot be called with {len(given)} of them "
            f"({error}); {role}"
        )
        raise CaptureError(msg) from error


def check_joint(joint: Joint) -> None:
    """Check that a captured step has one loss, trains something, and can be replayed.

    Raises
    ------
    CaptureError
        If not; names the operation and its module.
    """
    import torch

    losses = [result for result in joint.results if result.purpose is Purpose.LOSS]
    if len(losses) != 1 or losses[0].node.meta["val"].numel() != 1:
        shapes = [tuple(result.node.meta["val"].shape) for result in losses]
        msg = (
            f"{joint.name}: expected one loss with one element, got shapes {shapes}; "
            "reduce it with .mean() or .sum()"
        )
        raise CaptureError(msg)
    if losses[0].node.meta["val"].is_complex():
        msg = f"{joint.name}: expected a loss that is a real number; take .real or .abs() of it"
        raise CaptureError(msg)
    if not any(result.purpose is Purpose.GRADIENT for result in joint.results):
        msg = f"{joint.name}: the loss depends on no parameter that requires a gradient"
        raise CaptureError(msg)
    _check_objects(joint)
    for node in joint.graph_module.graph.nodes:
        if any(value.layout != torch.strided for value in tensors_in(node.meta.get("val"))):
            msg = (
                f"{joint.name}: {node.target}{in_module(node)} makes a sparse tensor, which "
                "cannot be scheduled; use dense ones (for an embedding: sparse=False)"
            )
            raise CaptureError(msg)
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            msg = (
                f"{joint.name}: {node.target}{in_module(node)} changes a tensor in place and "
                "cannot be replayed; use its functional form"
            )
            raise CaptureError(msg)


def _check_objects(joint: Joint) -> None:
    """Raise where an operation takes a random generator, or another object that is no tensor."""
    import torch

    for node in joint.graph_module.graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(joint.graph_module)
        if isinstance(value, torch.Tensor):
            continue
        user = next(iter(node.users), node)
        what = f"{joint.name}: {user.target}{in_module(user)} takes"
        if "Generator" in type(value).__name__ or "generator" in user.kwargs:
            msg = (
                f"{what} a random generator of its own, whose draws cannot be repeated; draw from "
                "the default generator (leave generator= out), or draw outside of the step"
            )
        else:
            msg = f"{what} a {type(value).__name__}, which cannot be replayed; leave it out"
        raise CaptureError(msg)
