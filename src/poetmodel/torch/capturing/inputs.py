"""Inputs and outputs of a step: their rules, flattening and restoring."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree

from poetmodel.errors import listed, shown
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Inputs = Sequence[Any] | Mapping[str, Any]
    Make = Callable[[Iterator[torch.Tensor]], Any]
    Leaves = list[tuple[str, torch.Tensor]]


def _plain(inputs: Any) -> Any:
    """Return inputs with dicts in place of mappings of any type."""
    return _pytree.tree_map(
        lambda value: (
            {key: _plain(item) for key, item in value.items()}
            if isinstance(value, Mapping)
            else value
        ),
        inputs,
        is_leaf=lambda value: isinstance(value, Mapping),
    )


def positional(inputs: Inputs) -> tuple[Any, ...]:
    """Return inputs in their order: a batch of named ones, by their names, is the only one."""
    if isinstance(inputs, Mapping):
        return (dict(sorted(inputs.items(), key=lambda item: str(item[0]))),)
    return tuple(inputs)


def flatten(inputs: Inputs) -> tuple[list[Any], Any]:
    """Return inputs flat, and their form; mappings of any type are dicts."""
    flat, form = _pytree.tree_flatten(_plain(positional(inputs)))
    return flat, form


def unflatten(flat: Sequence[Any], form: Any) -> tuple[Any, ...]:
    """Return inputs that were flattened."""
    inputs: tuple[Any, ...] = _pytree.tree_unflatten(list(flat), form)
    return inputs


def apart(inputs: Inputs) -> Inputs:
    """Return inputs in their order, each tensor in memory of its own, which has nothing else.

    A batch is often a part of a larger tensor, and so may two inputs be. What are no inputs stay as
    they are.
    """
    if not isinstance(inputs, tuple | list | Mapping):
        return inputs
    flat, form = flatten(inputs)
    return unflatten([_own(x) if isinstance(x, torch.Tensor) else x for x in flat], form)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def input_names(form: Any, *, by_name: bool) -> tuple[str, ...]:
    """Return the name of each flat input of a form, for people."""
    count = form.num_leaves
    if not by_name:
        return tuple(f"inputs[{position}]" for position in range(count))
    (batch,) = unflatten(range(count), form)
    paths = {
        position: f"{key}{_pytree.keystr(path)}"
        for key, value in batch.items()
        for path, position in _pytree.tree_leaves_with_path(value)
    }
    return tuple(paths[position] for position in range(count))


# -- what a model is called with ---------------------------------------------------------------


def _signature(model: torch.nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def takes_keywords(model: torch.nn.Module, given: Inputs) -> bool:
    """Whether a model is to get the items of its only input, a mapping, by name.

    It is where that mapping is given itself, in no tuple. In one, it is where all keys are
    parameters of its ``forward``, and not one thing by chance. Where ``forward`` takes any keyword
    (``**kwargs``), one of them must be a parameter that has a name.
    """
    if isinstance(given, Mapping):
        return True
    if len(given) != 1 or not isinstance(given[0], Mapping):
        return False
    called = _signature(model)
    if called is None:
        return False
    parameters = called.parameters.values()
    keys, kinds = set(given[0]), {parameter.kind for parameter in parameters}
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if kinds <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}:
        return True
    if inspect.Parameter.VAR_KEYWORD in kinds:
        keys &= named
    return bool(keys) and keys <= named and (len(given[0]) > 1 or len(named) > 1)


# -- what they must be -------------------------------------------------------------------------


def refuse(name: str, faults: Iterable[str]) -> None:
    """Raise `CaptureError` with the first of some faults of a step."""
    for fault in faults:
        raise CaptureError(f"{name}: {fault}")


def step_faults(model: torch.nn.Module, loss_fn: object, inputs: Inputs) -> Iterator[str]:
    """Yield why a step cannot be captured, as far as shows before a run."""
    if not torch.is_grad_enabled():
        yield "gradients are off (torch.no_grad): capture a training step outside of it"
    if not isinstance(model, torch.nn.Module):
        yield f"expected a torch.nn.Module, got a {type(model).__name__}"
    for path, module in model.named_modules():
        yield from _module_faults(path, module)
    if loss_fn is not None and not callable(loss_fn):
        yield f"loss_fn: expected a function or None, got {shown(loss_fn)}"
    if _is_compiled(loss_fn):
        yield "loss_fn is compiled (torch.compile); give the function that it was made of"
    if loss_fn is not None and isinstance(inputs, Mapping):
        yield (
            "loss_fn: a batch of named inputs is trained on the loss that the model returns; leave "
            "loss_fn out, or give a tuple such as (batch, target)"
        )
    yield from input_faults(inputs)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield from _tensor_faults(path, tensor)
    yield from _call_faults(model, inputs, alone=loss_fn is None)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield "no parameter requires a gradient, so there is nothing to train"


def empty_faults(inputs: Inputs) -> Iterator[str]:
    """Yield the inputs without elements, such as a batch of 0: a step of none trains nothing."""
    flat, form = flatten(inputs)
    names = input_names(form, by_name=isinstance(inputs, Mapping))
    for name, value in zip(names, flat, strict=True):
        if isinstance(value, torch.Tensor) and not value.numel():
            yield f"{name} has no elements (shape {list(value.shape)}); give a batch of 1 or more"


def _tensor_faults(path: str, tensor: torch.Tensor) -> Iterator[str]:
    if torch.nn.parameter.is_lazy(tensor):
        yield (
            f"{path} has no shape yet, as in every lazy module; call the model once on inputs first"
        )
    elif not is_plain(tensor) and tensor.layout == torch.strided:
        yield (
            f"{path} is a {type(tensor).__name__}, whose operations are its own; give a model "
            "whose parameters and buffers are plain tensors"
        )


def _module_faults(path: str, module: torch.nn.Module) -> Iterator[str]:
    kinds = [kind.__name__ for kind in type(module).__mro__]
    where = f"module {path!r} is" if path else "the model is"
    wrapped = "OptimizedModule" in kinds
    if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
        yield (
            f"{where} compiled (torch.compile), and its operations cannot be captured; give the "
            "module that it was made of" + (" (model._orig_mod)" if wrapped else ", not compiled")
        )
    if _is_compiled(module.forward):
        yield (
            f"forward of {path or 'the model'} is compiled (torch.compile), and its operations "
            "cannot be captured; give a module whose forward is not compiled"
        )
    if not _PARALLEL.isdisjoint(kinds):
        yield (
            f"{where} a {kinds[0]}, which a compiled step cannot keep in step with its replicas; "
            "give the module inside (model.module), and average gradients after the step"
        )
    if isinstance(module, torch.jit.ScriptModule):
        yield f"{where} scripted (torch.jit); give the module that it was made of"


_PARALLEL: Final = frozenset(
    ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
)


def _is_compiled(function: object) -> bool:
    """Whether a function was compiled, and not kept from it (``torch.compiler.disable``)."""
    made_of = hasattr(function, "_torchdynamo_orig_callable")
    return made_of and not getattr(function, "_torchdynamo_disable", False)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense memory that PyTorch's own kernels read."""
    own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return own and tensor.layout == torch.strided and not tensor.is_nested


def input_faults(inputs: object) -> Iterator[str]:
    """Yield why inputs are no tuple of what a step can take."""
    if not isinstance(inputs, tuple | list | Mapping):
        yield (
            "inputs: expected a tuple such as (x, y), the target last, or a mapping of named "
            f"inputs, got a {type(inputs).__name__}"
        )
        return
    named = inputs if isinstance(inputs, Mapping) else ()
    unnamed = [key for key in named if not isinstance(key, str)]
    if unnamed:
        yield f"inputs: expected names of parameters of forward as keys, got {shown(unnamed[0])}"
        return
    if len(inputs) == 0:
        yield "expected inputs (the target last), got none"
    flat, form = flatten(inputs)
    for name, value in zip(input_names(form, by_name=bool(named)), flat, strict=True):
        kind = type(value)
        if getattr(value, "layout", torch.strided) != torch.strided:
            yield f"{name}: expected a dense tensor, got {value.layout}"
        elif isinstance(value, torch.Tensor) and not is_plain(value):
            got = "nested tensor" if value.is_nested else kind.__name__
            yield f"{name}: expected a plain tensor, got a {got}; give the tensors that it holds"
        if kind.__module__ == "numpy":
            yield (
                f"{name}: expected a tensor, got a {kind.__name__} of numpy; convert it "
                "with torch.as_tensor"
            )
        if not isinstance(value, (torch.Tensor, str, int, float, NoneType)):
            yield (
                f"{name}: expected a tensor, got a {kind.__name__}; give the tensors that "
                "it holds, in a tuple, list or mapping"
            )


def _call_faults(model: torch.nn.Module, inputs: Inputs, *, alone: bool) -> Iterator[str]:
    """Yield what is wrong where the model does not take as many inputs as it is to get."""
    called = _signature(model)
    if called is None or model._forward_pre_hooks:  # noqa: SLF001 - they may change what it gets
        return
    given = positional(inputs) if alone else positional(inputs)[:-1]
    by_name = takes_keywords(model, inputs if alone else given)
    role = "without a loss_fn, the model gets all of them" if alone else "the last is the target"
    what = listed(given[0]) if by_name else f"{len(given)} of them: {role}"
    try:
        called.bind(**given[0]) if by_name else called.bind(*given)
    except TypeError as error:
        yield f"inputs: forward{called} cannot be called with {what} ({error})"


# -- outputs: the loss in what a model returns, and the rest of it -----------------------------

_PLAIN: Final = (
    bool, int, float, complex, str, bytes, NoneType, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device,
)  # fmt: skip
"""Outputs of each step in the form of the capture's."""


def loss_in(name: str, output: Any) -> Any:
    """Return the loss of an output: itself, what lies under ``loss`` in it, or its first item."""
    keyed = isinstance(output, Mapping)
    if keyed:
        loss = output.get("loss")
    elif isinstance(output, torch.Tensor) or not hasattr(output, "loss"):
        return output[0] if isinstance(output, tuple | list) and output else output
    else:
        loss = output.loss
    if loss is None:
        raise CaptureError(
            f"{name}: there is no loss in the {type(output).__name__} that is returned; give the "
            "model its target (labels), or give a loss_fn"
        )
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"{name}: expected a loss that is a tensor, got a {type(loss).__name__}")
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How what a model returned is made of its loss and other tensors.

    Tuples, lists, dataclasses, and the attributes of the output itself are as they were; mappings
    are dicts. Numbers, words and functions are those of the capture. Any other object in it, such
    as the cache of a language model, is None.
    """

    names: tuple[str, ...]
    """Where in the output each tensor beside the loss is, such as ``hidden_states[0]``."""
    _positions: tuple[int, ...]
    """For each tensor in the output: 0 for the loss, or 1 and up for others."""
    _make: Make

    @classmethod
    def of(cls, output: Any, loss: torch.Tensor) -> tuple[OutputForm, list[torch.Tensor]]:
        """Return the form of an output, and its tensors beside the loss."""
        leaves: Leaves = []
        make = _flatten(output, "", leaves)
        others: Leaves = []
        positions = []
        for path, tensor in leaves:
            if tensor is not loss:
                others.append((path, tensor))
            positions.append(0 if tensor is loss else len(others))
        form = cls(names=tuple(path for path, _ in others), _positions=tuple(positions), _make=make)
        return form, [tensor for _, tensor in others]

    def filled(self, loss: torch.Tensor, others: Sequence[torch.Tensor]) -> Any:
        """Return an output with these tensors."""
        values = (loss, *others)
        return self._make(values[position] for position in self._positions)

    def named(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of an output of this form by name; that of the loss is empty."""
        leaves: Leaves = []
        _flatten(output, "", leaves)
        names = ("", *self.names)
        return {
            names[position]: tensor
            for position, (_, tensor) in zip(self._positions, leaves, strict=True)
        }


def _flatten(value: Any, path: str, leaves: Leaves) -> Make:
    """Put the tensors of a value among the leaves; return what makes it of the next of them."""
    if isinstance(value, torch.Tensor):
        leaves.append((path or "tensor", value))
        return next
    if isinstance(value, _PLAIN):
        return lambda _: value
    kind = type(value)
    items: dict[Any, Any]
    if is_dataclass(value):
        items = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        build: Callable[[dict[Any, Any]], Any] = lambda attributes: kind(**attributes)  # noqa: E731
        named = "{}.{}"
    elif isinstance(value, Mapping):
        items = dict(value)
        build = dict
        named = "{}.{}"
    elif isinstance(value, tuple | list):
        items = dict(enumerate(value))
        make: Any = getattr(kind, "_make", kind)
        build = lambda elements: make(list(elements.values()))  # noqa: E731
        named = "{}[{}]"
    elif not path and hasattr(value, "__dict__"):
        items = dict(vars(value))
        build = partial(_with_attributes, _with_attributes(value, dict.fromkeys(items)))
        named = "{}.{}"
    else:
        return lambda _: None
    makers = {
        key: _flatten(item, named.format(path, key).removeprefix("."), leaves)
        for key, item in items.items()
    }
    return lambda values: build({key: maker(values) for key, maker in makers.items()})


def _with_attributes(value: Any, attributes: dict[str, Any]) -> Any:
    """Return a copy of an object with other attributes."""
    copied = copy.copy(value)
    vars(copied).update(attributes)
    return copied
