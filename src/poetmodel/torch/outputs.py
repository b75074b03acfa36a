"""Outputs: the loss in what a model returns, and the rest of it flat and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.errors import CaptureError
from poetmodel.torch.inputs import refilled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Make = Callable[[Iterator[torch.Tensor]], Any]
    Leaves = list[tuple[str, torch.Tensor]]

_PLAIN: Final = (
    bool, int, float, complex, str, bytes, NoneType, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device,
)  # fmt: skip
"""What comes out of each step as it came out of the capture."""


def loss_in(name: str, output: Any) -> Any:
    """Return the loss of an output: itself, what lies under ``loss`` in it, or its first item."""
    keyed = isinstance(output, Mapping)
    if keyed:
        found = output.get("loss")
    elif isinstance(output, torch.Tensor) or not hasattr(output, "loss"):
        return output[0] if isinstance(output, tuple | list) and output else output
    else:
        found = output.loss
    if found is None:
        raise CaptureError(
            f"{name}: there is no loss in the {type(output).__name__} that is returned; give the "
            "model its target (labels), or give a loss_fn"
        )
    if not isinstance(found, torch.Tensor):
        raise CaptureError(
            f"{name}: expected a loss that is a tensor, got a {type(found).__name__}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How what a model returned is made of its loss and other tensors.

    Tuples, lists, mappings, dataclasses, and the attributes of the output itself are as they were.
    Numbers, words and functions are those of the capture. Any other object in it, such as the cache
    of a language model, is None.
    """

    names: tuple[str, ...]
    """Where in the output each tensor beside the loss is, such as ``hidden_states[0]``."""
    _places: tuple[int, ...]
    """For each tensor in the output: 0 for the loss, or 1 and up for others."""
    _make: Make

    @classmethod
    def of(cls, output: Any, loss: torch.Tensor) -> tuple[OutputForm, list[torch.Tensor]]:
        """Return the form of an output, and its tensors beside the loss."""
        leaves: Leaves = []
        make = _taken(output, "", leaves)
        others: Leaves = []
        places = []
        for path, tensor in leaves:
            if tensor is not loss:
                others.append((path, tensor))
            places.append(0 if tensor is loss else len(others))
        form = cls(names=tuple(path for path, _ in others), _places=tuple(places), _make=make)
        return form, [tensor for _, tensor in others]

    def filled(self, loss: torch.Tensor, others: Sequence[torch.Tensor]) -> Any:
        """Return an output with these tensors."""
        values = (loss, *others)
        return self._make(values[place] for place in self._places)

    def named(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of an output of this form by name; that of the loss is empty."""
        leaves: Leaves = []
        _taken(output, "", leaves)
        names = ("", *self.names)
        return {
            names[place]: tensor for place, (_, tensor) in zip(self._places, leaves, strict=True)
        }


def _taken(value: Any, path: str, leaves: Leaves) -> Make:
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
        build: Callable[[dict[Any, Any]], Any] = lambda found: kind(**found)  # noqa: E731
        named = "{}.{}"
    elif isinstance(value, Mapping):
        items = dict(value)
        build = partial(refilled, refilled(value, dict.fromkeys(value)))
        named = "{}.{}"
    elif isinstance(value, tuple | list):
        items = dict(enumerate(value))
        make: Any = getattr(kind, "_make", kind)
        build = lambda found: make(list(found.values()))  # noqa: E731
        named = "{}[{}]"
    elif not path and hasattr(value, "__dict__"):
        items = dict(vars(value))
        build = partial(_with_attributes, _with_attributes(value, dict.fromkeys(items)))
        named = "{}.{}"
    else:
        return lambda _: None
    makers = {
        key: _taken(item, named.format(path, key).removeprefix("."), leaves)
        for key, item in items.items()
    }
    return lambda values: build({key: maker(values) for key, maker in makers.items()})


def _with_attributes(value: Any, attributes: dict[str, Any]) -> Any:
    """Return a copy of an object with other attributes."""
    found = copy.copy(value)
    vars(found).update(attributes)
    return found
