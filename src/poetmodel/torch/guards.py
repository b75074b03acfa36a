"""Guards: what a captured step holds for, and what a call differs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.torch.joint import Joint


@dataclass(frozen=True, slots=True)
class Signature:
    """All that a captured step depends on and a user may change between steps."""

    inputs: tuple[Any, ...]
    """Of each flat input its `_form`, or itself where it is no tensor."""
    tensors: tuple[Any, ...]
    """Of each parameter and buffer its `_form`."""
    training: tuple[bool, ...]
    """Whether each module is in training mode."""
    autocast: bool
    """Whether autocast is on around the step; what a model does inside is in the graph."""


def signature(joint: Joint, inputs: Sequence[Any]) -> Signature:
    """Return what a step on some flat inputs depends on, as things are now."""
    import torch

    return Signature(
        inputs=tuple(map(_form, inputs)),
        tensors=tuple(map(_form, joint.owned_values())),
        training=tuple(module.training for module in joint.module.modules()),
        autocast=torch.is_autocast_enabled("cpu"),
    )


def differences(joint: Joint, compiled: Signature, found: Signature) -> Iterator[str]:
    """Yield in words what is not as it was when the step was compiled."""
    for place, (before, now) in enumerate(zip(compiled.inputs, found.inputs, strict=True)):
        if before != now:
            yield f"inputs[{place}] was {_shown(before)} and is {_shown(now)}"
    for argument, before, now in zip(joint.owned, compiled.tensors, found.tensors, strict=True):
        if before != now:
            yield f"{argument.name} was {_shown(before)} and is {_shown(now)}"
    # The first module wraps the model and its loss, and is always as it was.
    if compiled.training[1:] != found.training[1:]:
        yield "modules were put into or out of training mode"
    if compiled.autocast != found.autocast:
        yield "autocast is on around the step: use it inside of the model and the loss"


def _form(value: Any) -> Any:
    """Return of a tensor all but its values; anything else is itself."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return (value.shape, value.dtype, value.stride(), value.device, value.requires_grad)


def _shown(form: Any) -> str:
    if not isinstance(form, tuple):
        return repr(form)
    shape, dtype, stride, device, trained = form
    named = f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}"
    return f"{named} on {device}" + (", requiring a gradient" if trained else "")
