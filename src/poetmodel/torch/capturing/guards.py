"""Guards: what a captured step holds for, what a call differs in, and what no step can do."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.errors import listed
from poetmodel.torch.capturing.inputs import is_plain
from poetmodel.torch.capturing.joint_graph import InputKind, Joint, Lookup, OutputKind, shown_path
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.tensors import storage_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


HOOKS: Final = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)  # fmt: skip
"""Where a module has its hooks."""

# -- guards ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assumptions:
    """All that a captured step depends on and a user may change between steps."""

    inputs: tuple[Any, ...]
    """`_form` of each flat input."""
    modules: tuple[int, ...]
    """Identities of the modules."""
    training: tuple[bool, ...]
    hooks: tuple[tuple[int, ...], ...]
    """Keys of the hooks of each module: those that there were are part of the program."""
    tensors: tuple[Any, ...]
    """`_form` of each parameter and buffer; empty if modules are others, or one is gone."""
    same: tuple[int, ...]
    """Position of the first equal tensor, for each parameter and buffer, and for each input that a
    step changes or gives a gradient."""
    touched: tuple[int | None, ...]
    """Changed objects of the step that each input shares memory with; empty if a step
    changes nothing."""
    autocast: bool
    """Whether autocast is on around the step; what a model does inside is in the graph."""


class Guards:
    """Whether a captured step holds for a call, if it holds for things as they are now.

    Raises `CaptureError` if the step would leave out what PyTorch does.
    """

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        named = tuple(joint.module.named_modules())
        self._names = tuple(shown_path(path) or "the model" for path, _ in named)
        # As long as these are held, no other module can have the identity of one of them.
        self._modules = tuple(module for _, module in named)
        self._identities = tuple(map(id, self._modules))
        changed = {result.target for result in joint.results}
        inputs = [argument for argument in joint.of(InputKind.USER_INPUT) if argument in changed]
        self._written = tuple(argument.position for argument in inputs)
        self._shared = tuple(argument.name for argument in (*joint.owned, *inputs))
        kinds = {r.target: r.kind for r in joint.results if r.kind is OutputKind.MUTATION}
        updated = joint.owned if joint.optimizer is not None else ()
        own = [argument for argument in joint.owned if argument in kinds or argument in updated]
        self._changed = Lookup([argument.target for argument in own])
        """Changes of the step to the module."""
        self._changed_inputs = [a.position for a in inputs if a in kinds]
        self._changed_names = [argument.name for argument in own]
        self._changed_names += [joint.input_names[position] for position in self._changed_inputs]
        self._constants = tuple(_places_of_constants(joint, self._names, self._modules))
        self.compiled = self._assumptions(joint.inputs)

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Whether the step computes what PyTorch would for flat inputs.

        Raises `CaptureError` if no step would: it cannot run hooks of parameters, for one.
        """
        joint = self._joint
        return (
            joint.python.hold()
            and not any(self._replaced_constants())
            and self._assumptions(inputs) == self.compiled
            and joint.read.hold(joint.read_from(inputs))
        )

    def differences(self, inputs: Sequence[Any]) -> Iterator[str]:
        """Yield in words what is not as it was when the step was compiled."""
        before, now = self.compiled, self._assumptions(inputs)
        yield from _changed(self._joint.input_names, before.inputs, now.inputs)
        if before.modules != now.modules:
            yield _replaced(self._names, before.modules, now.modules)
            return
        owned = self._joint.owned
        if len(owned) != len(now.tensors):
            yield "a parameter or a buffer is gone"
            return
        yield from _changed([argument.name for argument in owned], before.tensors, now.tensors)
        yield from _untied(self._shared, before.same, now.same)
        names = self._joint.input_names
        for name, old, new in zip(names, before.touched, now.touched, strict=False):
            if old != new:
                changed = self._changed_names[(new if old is None else old) or 0]
                how = "shares no memory" if new is None else "shares memory"
                yield f"{name} {how} with {changed}, which the step changes"
        yield from self._module_differences(now)
        replaced = [*self._replaced_constants()]
        yield from (f"{name} is another tensor, or gone" for name in replaced)
        python = [*self._joint.python.differences()]
        yield from python
        if before == now and not replaced and not python:
            yield from self._joint.read.differences(self._joint.read_from(inputs))

    def _touched(self, inputs: Sequence[Any]) -> tuple[int | None, ...]:
        """Return, for each input, the changed object that it shares memory with."""
        if not self._changed_names:
            return ()
        changed = [*self._changed(self._joint.module), *(inputs[k] for k in self._changed_inputs)]
        places: dict[int, list[int]] = {}
        for place, tensor in enumerate(changed):
            places.setdefault(storage_key(tensor), []).append(place)
        return tuple(
            next((k for k in places.get(storage_key(value), ()) if _meet(changed[k], value)), None)
            if isinstance(value, torch.Tensor) and is_plain(value)
            else None
            for value in inputs
        )

    def _replaced_constants(self) -> Iterator[str]:
        """Yield where another tensor is than the constant of the step; its values may change."""
        for holder, key, name, constant in self._constants:
            if holder.get(key) is not constant:
                yield name

    def _module_differences(self, now: Assumptions) -> Iterator[str]:
        before = self.compiled
        # The first module wraps the model and its loss, and is always as it was.
        if before.training[1:] != now.training[1:]:
            yield "modules were put into or out of training mode"
        for name, hooks, others in zip(self._names, before.hooks, now.hooks, strict=True):
            if hooks != others:
                yield f"hooks of {name} came or went"
        if before.autocast != now.autocast:
            yield "autocast is on around the step: use it inside of the model and the loss"

    def _assumptions(self, inputs: Sequence[Any]) -> Assumptions:
        """Return the present values that a step on some flat inputs depends on."""
        joint = self._joint
        modules = tuple(joint.module.modules())
        states = [module.__dict__ for module in modules]
        identities = tuple(map(id, modules))
        try:
            values = joint.owned_values() if identities == self._identities else []
        except AttributeError:
            values = []
        refuse_surroundings()
        refuse_inputs(inputs)
        hooked = [joint.owned[k].name for k, value in enumerate(values) if _is_hooked(value)]
        if hooked:
            raise CaptureError(_hook_fault(joint.name, hooked))
        first: dict[int, int] = {}
        shared = (*map(id, values), *(id(inputs[position]) for position in self._written))
        return Assumptions(
            inputs=tuple(map(_form, inputs)),
            modules=identities,
            training=tuple([state["training"] for state in states]),
            hooks=tuple([tuple(chain(*map(state.get, HOOKS))) for state in states]),
            tensors=tuple(map(_form, values)),
            same=tuple([first.setdefault(identity, k) for k, identity in enumerate(shared)]),
            touched=self._touched(inputs) if values else (),
            autocast=torch.is_autocast_enabled("cpu"),
        )


def _meet(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors in one storage reach into the same part of it."""
    begins, ends = [], []
    for tensor in (first, second):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        begins.append(tensor.storage_offset() * tensor.element_size())
        ends.append(begins[-1] + span * tensor.element_size())
    return bool(max(begins) < min(ends))


def _places_of_constants(
    joint: Joint, names: Sequence[str], modules: Sequence[torch.nn.Module]
) -> Iterator[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """Yield where a constant is an attribute of a module, or a name of a Python module."""
    constants = {id(value) for value in map(joint.value, joint.of(InputKind.CONSTANT_TENSOR))}
    if not constants:
        return
    holders = [(name, vars(module)) for name, module in zip(names, modules, strict=True)]
    holders += [
        (module.__name__, vars(module))
        for module in list(sys.modules.values())
        if type(module) is ModuleType
    ]
    for name, holder in holders:
        for key, value in list(holder.items()):
            if id(value) in constants:
                yield holder, key, f"{name}.{key}", value


# -- what no step can do -----------------------------------------------------------------------


def refuse_surroundings() -> None:
    """Raise `CaptureError` inside of inference mode, whose tensors cannot be trained on."""
    if torch.is_inference_mode_enabled():
        raise CaptureError("inference mode is on: compile and call a training step outside of it")


def refuse_inputs(inputs: Iterable[Any]) -> None:
    """Raise `CaptureError` if something before the step waits for the gradient of a flat input."""
    for position, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if not value.is_leaf:
            raise CaptureError(
                f"inputs[{position}] requires a gradient and was computed from other tensors, "
                "which a step does not reach: they would get no gradient. Give inputs"
                f"[{position}].detach(), or put what computes it into the model"
            )
        if _is_hooked(value):
            raise CaptureError(_hook_fault("step", [f"inputs[{position}]"]))


def _is_hooked(tensor: torch.Tensor | None) -> bool:
    """Whether PyTorch would run a hook when a tensor gets its gradient."""
    return tensor is not None and bool(
        (tensor._backward_hooks or tensor._post_accumulate_grad_hooks)  # noqa: SLF001
        and tensor.requires_grad
    )


def _hook_fault(name: str, parameters: Sequence[str]) -> str:
    """Return the faults in hooks of parameters, with a remedy."""
    return (
        f"{name}: {listed(parameters)}: a compiled step does not run hooks of parameters "
        "(register_hook, register_post_accumulate_grad_hook); remove them, and do what they do "
        "with .grad after the step"
    )


# -- words and forms ---------------------------------------------------------------------------


def _form(value: Any) -> Any:
    """Return all of a tensor but its values; of anything else its type and its text.

    As text NaN is equal to itself, and numbers of two types are not.
    """
    if not isinstance(value, torch.Tensor):
        return (type(value), repr(value))
    if not is_plain(value):
        return (type(value), f"a {type(value).__name__} of layout {value.layout}")
    return (value.shape, value.dtype, value.stride(), value.device, value.requires_grad)


def _shown(form: Any) -> str:
    if len(form) == 2:  # noqa: PLR2004 - no tensor: type and text
        return str(form[1])
    shape, dtype, stride, device, trained = form
    named = f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}"
    return f"{named} on {device}" + (", requiring a gradient" if trained else "")


def _changed(names: Iterable[str], before: Iterable[Any], now: Iterable[Any]) -> Iterator[str]:
    for name, form, other in zip(names, before, now, strict=True):
        if form != other:
            yield f"{name} was {_shown(form)} and is {_shown(other)}"


def _replaced(names: Sequence[str], before: Sequence[int], now: Sequence[int]) -> str:
    if len(before) == len(now):
        replaced = [name for name, old, new in zip(names, before, now, strict=True) if old != new]
    else:
        there = set(now)
        replaced = [name for name, old in zip(names, before, strict=True) if old not in there]
    if not replaced:
        return "modules were added to the model"
    return f"{listed(replaced)}: another module is there, or none"


def _untied(names: Sequence[str], before: Sequence[int], now: Sequence[int]) -> Iterator[str]:
    for k, (old, new) in enumerate(zip(before, now, strict=True)):
        if old == new:
            continue
        if old != k:
            yield f"{names[k]} was the same tensor as {names[old]} and is not"
        if new != k:
            yield f"{names[k]} was not the same tensor as {names[new]} and is"
