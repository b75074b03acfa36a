"""Inputs and outputs of a step: checks, flattening and rebuilding."""

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

from poetmodel.errors import join_names, quote
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Inputs = Sequence[Any] | Mapping[str, Any]
    Builder = Callable[[Iterator[torch.Tensor]], Any]
    """Returns a value, given an iterator over the tensors in it."""
    Access = tuple[tuple[bool, Any], ...]
    """Steps to a value in an output: (whether by attribute, name, key or position)."""
    Leaves = list[tuple[str, Access, torch.Tensor]]
    """(path in the output, steps to it, tensor) of each tensor."""


def _convert_mappings(inputs: Any) -> Any:
    """Return inputs with mappings at any depth converted to dicts; tuples keep their types."""
    return _pytree.tree_map(
        lambda value: (
            {key: _convert_mappings(item) for key, item in value.items()}
            if isinstance(value, Mapping)
            else value
        ),
        inputs,
        is_leaf=lambda value: isinstance(value, Mapping),
    )


def positional_inputs(inputs: Inputs) -> tuple[Any, ...]:
    """Return inputs as a tuple; named inputs become a tuple of one dict, sorted by name."""
    if isinstance(inputs, Mapping):
        return (dict(sorted(inputs.items(), key=lambda item: str(item[0]))),)
    return tuple(inputs)


def flatten(inputs: Inputs) -> tuple[list[Any], Any]:
    """Return (flat list of inputs, its nesting as a ``TreeSpec``); all mappings count as dicts."""
    flat, spec = _pytree.tree_flatten(_convert_mappings(positional_inputs(inputs)))
    return flat, spec


def unflatten(flat: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """Return flat inputs as a tuple, in the nesting `spec`; named ones as a tuple of one dict."""
    inputs: tuple[Any, ...] = _pytree.tree_unflatten(list(flat), spec)
    return inputs


class Nesting:
    """The nesting `spec` of inputs; tensors in one tuple, or in one mapping, are taken quickly."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        indices = tuple(range(spec.num_leaves))
        structure = unflatten(indices, spec)
        self._is_tuple = structure == indices
        self._keys: tuple[str, ...] = ()
        if len(structure) == 1 and type(structure[0]) is dict:
            items: dict[str, Any] = structure[0]
            self._keys = tuple(items) if tuple(items.values()) == indices else ()

    def take(self, inputs: Inputs) -> tuple[Any, ...] | None:
        """Return inputs flat if they are tensors in this nesting; otherwise None, or they are."""
        if self._is_tuple and type(inputs) is tuple:
            values = inputs
        elif self._keys and type(inputs) is dict and inputs.keys() == {*self._keys}:
            values = tuple([inputs[key] for key in self._keys])
        else:
            return None
        is_quick = len(values) == self.spec.num_leaves and all(
            type(value) is torch.Tensor for value in values
        )
        return values if is_quick else None

    def rebuild(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Return flat inputs in the nesting, as `unflatten`."""
        if self._is_tuple:
            return tuple(flat)
        if self._keys:
            return (dict(zip(self._keys, flat, strict=True)),)
        return unflatten(flat, self.spec)


def copy_inputs(inputs: Inputs) -> Any:
    """Return inputs with a detached copy of each tensor; ``requires_grad`` is unchanged.

    Each copy has memory of its own: a batch is often a view of a larger tensor, and inputs may
    share one. A list becomes a tuple, a mapping a tuple of one dict, sorted by name. Anything but a
    tuple, list or mapping is returned itself.
    """
    if not isinstance(inputs, tuple | list | Mapping):
        return inputs
    flat, spec = flatten(inputs)
    return unflatten(
        [_copy_tensor(value) if isinstance(value, torch.Tensor) else value for value in flat], spec
    )


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def input_names(spec: Any, *, by_name: bool) -> tuple[str, ...]:
    """Return the name of each flat input for display: ``inputs[0]``, or ``masks['causal']``."""
    count = spec.num_leaves
    if not by_name:
        return tuple(f"inputs[{position}]" for position in range(count))
    (batch,) = unflatten(range(count), spec)
    paths = {
        position: f"{key}{_pytree.keystr(path)}"
        for key, value in batch.items()
        for path, position in _pytree.tree_leaves_with_path(value)
    }
    return tuple(paths[position] for position in range(count))


# -- arguments of a model ----------------------------------------------------------------------


def _find_signature(model: torch.nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def takes_keywords(model: torch.nn.Module, arguments: Inputs) -> bool:
    """Return whether a model gets the items of its only argument, a mapping, as keywords.

    A mapping in a tuple counts if ``forward`` has no positional arguments, or if the keys are its
    parameters: with more than one key or parameter, so that no single name matches by chance.
    """
    if isinstance(arguments, Mapping):
        return True
    if len(arguments) != 1 or not isinstance(arguments[0], Mapping):
        return False
    signature = _find_signature(model)
    if signature is None:
        return False
    parameters = signature.parameters.values()
    keys, parameter_kinds = set(arguments[0]), {parameter.kind for parameter in parameters}
    parameter_names = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if parameter_kinds <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}:
        return True
    if inspect.Parameter.VAR_KEYWORD in parameter_kinds:
        keys &= parameter_names
    return (
        bool(keys)
        and keys <= parameter_names
        and (len(arguments[0]) > 1 or len(parameter_names) > 1)
    )


# -- checks of steps and inputs ----------------------------------------------------------------


def refuse(name: str, errors: Iterable[str]) -> None:
    """Raise `CaptureError` with the first error of step `name`; return if there is none."""
    for error in errors:
        raise CaptureError(f"{name}: {error}")


def step_errors(model: torch.nn.Module, loss_fn: object, inputs: Inputs) -> Iterator[str]:
    """Yield each error of a step that is detectable without executing the step.

    Callers stop at the first error, because later checks may then raise other exceptions.
    """
    if not torch.is_grad_enabled():
        yield "gradients are off (torch.no_grad, for example): capture a training step with them on"
    if not isinstance(model, torch.nn.Module):
        yield f"expected a torch.nn.Module, got a {type(model).__name__}"
    for path, module in model.named_modules():
        yield from _module_errors(path, module)
    if loss_fn is not None and not callable(loss_fn):
        yield f"loss_fn: expected a function or None, got {quote(loss_fn)}"
    if _is_compiled(loss_fn):
        yield "loss_fn is compiled (torch.compile); pass the original function"
    if loss_fn is not None and isinstance(inputs, Mapping):
        yield (
            "loss_fn: a batch of named inputs is trained on the loss that the model returns; leave "
            "loss_fn out, or pass a tuple such as (batch, target)"
        )
    yield from input_errors(inputs)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield from _tensor_errors(path, tensor)
    yield from _call_errors(model, inputs, has_no_loss_fn=loss_fn is None)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield "no parameter requires a gradient, so there is nothing to train"


def empty_input_errors(inputs: Inputs) -> Iterator[str]:
    """Yield an error for each input tensor without elements, such as a batch of 0."""
    flat, spec = flatten(inputs)
    names = input_names(spec, by_name=isinstance(inputs, Mapping))
    for name, value in zip(names, flat, strict=True):
        if isinstance(value, torch.Tensor) and not value.numel():
            yield f"{name} has no elements (shape {list(value.shape)}); pass a batch of 1 or more"


def _tensor_errors(path: str, tensor: torch.Tensor) -> Iterator[str]:
    """Yield an error if a parameter or buffer is lazy, or strided but not plain (`is_plain`)."""
    if torch.nn.parameter.is_lazy(tensor):
        yield (
            f"{path} has no shape yet, as in every lazy module; call the model once on inputs first"
        )
    elif not is_plain(tensor) and tensor.layout == torch.strided:
        yield (
            f"{path} is a {type(tensor).__name__}, whose operations are its own; pass a model "
            "whose parameters and buffers are plain tensors"
        )


def _module_errors(path: str, module: torch.nn.Module) -> Iterator[str]:
    """Yield errors of a compiled or scripted module, compiled ``forward`` or parallel wrapper."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    subject = f"module {path!r} is" if path else "the model is"
    is_wrapper = "OptimizedModule" in kinds
    if is_wrapper or getattr(module, "_compiled_call_impl", None) is not None:
        yield (
            f"{subject} compiled (torch.compile), and its operations cannot be captured; pass the "
            "original module" + (" (model._orig_mod)" if is_wrapper else ", not compiled")
        )
    if _is_compiled(module.forward):
        yield (
            f"forward of {path or 'the model'} is compiled (torch.compile), and its operations "
            "cannot be captured; pass a module whose forward is not compiled"
        )
    if not _PARALLEL_WRAPPERS.isdisjoint(kinds):
        yield (
            f"{subject} a {kinds[0]}, and a compiled step does not synchronize its replicas; pass "
            "the module inside (model.module), and average gradients after the step"
        )
    if isinstance(module, torch.jit.ScriptModule):
        yield f"{subject} scripted (torch.jit); pass the original module"


_PARALLEL_WRAPPERS: Final = frozenset(
    ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
)
"""Names of classes of modules that execute a model in several replicas or shards."""


def _is_compiled(function: object) -> bool:
    """Return whether a function is compiled, and not excluded by ``torch.compiler.disable``."""
    is_wrapper = hasattr(function, "_torchdynamo_orig_callable")
    return is_wrapper and not getattr(function, "_torchdynamo_disable", False)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, not nested, and without ``__torch_dispatch__``."""
    has_standard_dispatch = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return has_standard_dispatch and tensor.layout == torch.strided and not tensor.is_nested


def input_errors(inputs: object) -> Iterator[str]:
    """Yield an error for inputs that are empty, or no tuple, list, or mapping by strings.

    Items may be plain tensors, str, int, float or None; each other item is an error.
    """
    if not isinstance(inputs, tuple | list | Mapping):
        yield (
            "inputs: expected a tuple such as (x, y), the target last, or a mapping of named "
            f"inputs, got a {type(inputs).__name__}"
        )
        return
    named_inputs = inputs if isinstance(inputs, Mapping) else ()
    invalid_keys = [key for key in named_inputs if not isinstance(key, str)]
    if invalid_keys:
        yield (
            f"inputs: expected names of parameters of forward as keys, got {quote(invalid_keys[0])}"
        )
        return
    if len(inputs) == 0:
        yield "expected inputs (the target last), got none"
    flat, spec = flatten(inputs)
    for name, value in zip(input_names(spec, by_name=bool(named_inputs)), flat, strict=True):
        kind = type(value)
        if getattr(value, "layout", torch.strided) != torch.strided:
            yield f"{name}: expected a dense tensor, got {value.layout}"
        elif isinstance(value, torch.Tensor) and not is_plain(value):
            kind_name = "nested tensor" if value.is_nested else kind.__name__
            yield (
                f"{name}: expected a plain tensor, got a {kind_name}; pass the tensors that it "
                "contains"
            )
        if kind.__module__ == "numpy":
            yield (
                f"{name}: expected a tensor, got a {kind.__name__} of numpy; convert it "
                "with torch.as_tensor"
            )
        if not isinstance(value, (torch.Tensor, str, int, float, NoneType)):
            yield (
                f"{name}: expected a tensor, got a {kind.__name__}; pass the tensors that it "
                "contains, in a tuple, list or mapping"
            )


def _call_errors(model: torch.nn.Module, inputs: Inputs, *, has_no_loss_fn: bool) -> Iterator[str]:
    """Yield an error if ``forward`` rejects the inputs without target; none if it has pre-hooks."""
    signature = _find_signature(model)
    if signature is None or model._forward_pre_hooks:  # noqa: SLF001 - hooks may change arguments
        return
    arguments = positional_inputs(inputs) if has_no_loss_fn else positional_inputs(inputs)[:-1]
    by_name = takes_keywords(model, inputs if has_no_loss_fn else arguments)
    role = (
        "without a loss_fn, the model gets all of them"
        if has_no_loss_fn
        else "the last is the target"
    )
    inputs_text = join_names(arguments[0]) if by_name else f"{len(arguments)} of them: {role}"
    try:
        signature.bind(**arguments[0]) if by_name else signature.bind(*arguments)
    except TypeError as error:
        yield f"inputs: forward{signature} cannot be called with {inputs_text} ({error})"


# -- outputs: the loss in a model's output, and its other tensors -------------------------------

_CONSTANT_TYPES: Final = (
    bool, int, float, complex, str, bytes, NoneType, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device,
)  # fmt: skip
"""Types of output values that each step returns unchanged from the capture."""


def find_loss(name: str, output: Any) -> Any:
    """Return the loss of an output: its item or attribute ``loss``, its first item, or itself.

    Refuses a mapping without ``loss``, and a ``loss`` that is no tensor.
    """
    is_mapping = isinstance(output, Mapping)
    if is_mapping:
        loss = output.get("loss")
    elif isinstance(output, torch.Tensor) or not hasattr(output, "loss"):
        is_sequence = isinstance(output, (tuple, list))  # PyTorch 2.9 does not trace tuple | list
        return output[0] if is_sequence and output else output
    else:
        loss = output.loss
    if loss is None:
        raise CaptureError(
            f"{name}: there is no loss in the {type(output).__name__} that is returned; pass the "
            "model its target (labels), or pass a loss_fn"
        )
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"{name}: expected a loss that is a tensor, got a {type(loss).__name__}")
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputStructure:
    """The structure of a model's output around its loss and other tensors.

    Mappings become dicts; a dataclass is rebuilt from its ``__init__`` fields. `_CONSTANT_TYPES`
    are those of the capture. Any other object, such as the cache of a language model, becomes None.
    """

    names: tuple[str, ...]
    """Path in the output of each tensor besides the loss, such as ``hidden_states[0]``."""
    accesses: tuple[Access, ...]
    """Steps from the output to each tensor of `names`."""
    _positions: tuple[int, ...]
    """For each tensor in the output: 0 for the loss, or 1 + its index in `names`."""
    _builder: Builder
    """Returns an output, given an iterator over its tensors."""

    @classmethod
    def from_output(
        cls, output: Any, loss: torch.Tensor
    ) -> tuple[OutputStructure, list[torch.Tensor]]:
        """Return an output's structure, and other tensors in order of `names`, maybe repeated."""
        leaves: Leaves = []
        builder = _collect_tensors(output, "", leaves)
        further_leaves: Leaves = []
        positions = []
        for leaf in leaves:
            tensor = leaf[-1]
            if tensor is not loss:
                further_leaves.append(leaf)
            positions.append(0 if tensor is loss else len(further_leaves))
        structure = cls(
            names=tuple(path for path, _, _ in further_leaves),
            accesses=tuple(access for _, access, _ in further_leaves),
            _positions=tuple(positions),
            _builder=builder,
        )
        return structure, [tensor for *_, tensor in further_leaves]

    def build(self, loss: torch.Tensor, other_tensors: Sequence[torch.Tensor]) -> Any:
        """Return an output of this structure; `other_tensors` are in the order of `names`."""
        values = (loss, *other_tensors)
        return self._builder(values[position] for position in self._positions)

    def tensors_by_name(self, output: Any) -> dict[str, torch.Tensor]:
        """Return an output's tensors by name, assigned by position; the loss has the name ""."""
        leaves: Leaves = []
        _collect_tensors(output, "", leaves)
        names = ("", *self.names)
        return {
            names[position]: tensor
            for position, (*_, tensor) in zip(self._positions, leaves, strict=True)
        }


def follow(output: Any, access: Access) -> Any:
    """Return the value in an output to which steps lead."""
    for is_attribute, key in access:
        output = getattr(output, key) if is_attribute else output[key]
    return output


def _collect_tensors(value: Any, path: str, leaves: Leaves, access: Access = ()) -> Builder:
    """Append the tensors in `value`, at `path`, to `leaves`; return its builder from new ones."""
    if isinstance(value, torch.Tensor):
        leaves.append((path or "tensor", access, value))
        return next
    if isinstance(value, _CONSTANT_TYPES):
        return lambda _: value
    kind = type(value)
    items: dict[Any, Any]
    is_attribute = is_dataclass(value) or not isinstance(value, Mapping | tuple | list)
    if is_dataclass(value):
        items = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        build: Callable[[dict[Any, Any]], Any] = lambda attributes: kind(**attributes)  # noqa: E731
        path_format = "{}.{}"
    elif isinstance(value, Mapping):
        items = dict(value)
        build = dict
        path_format = "{}.{}"
    elif isinstance(value, tuple | list):
        items = dict(enumerate(value))
        make: Any = getattr(kind, "_make", kind)
        build = lambda elements: make(list(elements.values()))  # noqa: E731
        path_format = "{}[{}]"
    elif not path and hasattr(value, "__dict__"):
        items = dict(vars(value))
        build = partial(_copy_with_attributes, _copy_with_attributes(value, dict.fromkeys(items)))
        path_format = "{}.{}"
    else:
        return lambda _: None
    builders = {
        key: _collect_tensors(
            item,
            path_format.format(path, key).removeprefix("."),
            leaves,
            (*access, (is_attribute, key)),
        )
        for key, item in items.items()
    }
    return lambda values: build({key: builder(values) for key, builder in builders.items()})


def _copy_with_attributes(value: Any, attributes: dict[str, Any]) -> Any:
    """Return a shallow copy of an object, with the values of `attributes` as attributes."""
    object_copy = copy.copy(value)
    vars(object_copy).update(attributes)
    return object_copy
