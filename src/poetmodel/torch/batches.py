"""Batches: nests of tuples, lists and mappings as flat tuples, and back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from poetmodel.torch.failures import RAISED, CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class _Box:
    """A mapping of any type on its way to being flat."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self.keys = _Keys(mapping)
        self.values = [boxed(mapping[key]) for key in self.keys.ordered]


class _Keys:
    """What is known of a mapping beside its values; two are equal if they have the same keys."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self.mapping = mapping
        self.ordered = tuple(sorted(mapping, key=lambda key: (type(key).__name__, repr(key))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keys) and self.ordered == other.ordered

    def __hash__(self) -> int:
        return hash(self.ordered)

    def refilled(self, values: Sequence[Any]) -> Any:
        """Return a mapping of the same type with other values, in the order of its keys."""
        found = dict(zip(self.ordered, values, strict=True))
        return _refilled(self.mapping, {key: found[key] for key in self.mapping})


def boxed(inputs: Any) -> Any:
    """Return inputs with boxes in place of mappings."""
    from torch.utils import _pytree

    _register()
    return _pytree.tree_map(
        lambda value: _Box(value) if isinstance(value, Mapping) else value,
        inputs,
        is_leaf=lambda value: isinstance(value, Mapping),
    )


def flatten(inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return inputs flat, and their form; mappings of any type by their keys, sorted."""
    from torch.utils import _pytree

    flat, form = _pytree.tree_flatten(boxed(tuple(inputs)))
    return flat, form


def unflatten(flat: Sequence[Any], form: Any) -> tuple[Any, ...]:
    """Return inputs of the types that they were flattened from.

    Raises
    ------
    CaptureError
        If a mapping cannot be made with other values.
    """
    from torch.utils import _pytree

    found: tuple[Any, ...] = _pytree.tree_unflatten(list(flat), form)
    return found


@cache
def _register() -> None:
    from torch.utils import _pytree

    _pytree.register_pytree_node(
        _Box,
        lambda box: (box.values, box.keys),
        lambda values, keys: keys.refilled(list(values)),
        serialized_type_name="poetmodel.torch.batches.Box",
    )


def _refilled(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return values
    for way in (_copied, _assigned, _made):
        try:
            found = way(mapping, values)
            if all(found[key] is value for key, value in values.items()):
                return found
        except RAISED:
            continue
    msg = (
        f"inputs: a {type(mapping).__name__} cannot be made with other values; give a dict, such "
        "as dict(batch), or its values one by one"
    )
    raise CaptureError(msg)


def _copied(mapping: Any, values: dict[Any, Any]) -> Any:
    """Return a copy of an object, with other values in the dicts that it holds its items in."""
    found = copy.copy(mapping)
    for name, held in vars(found).items():
        if isinstance(held, dict) and held.keys() >= values.keys():
            vars(found)[name] = type(held)(held | values)
    return found


def _assigned(mapping: Any, values: dict[Any, Any]) -> Any:
    """Return a copy of a dict, with other values assigned."""
    if not isinstance(mapping, dict):
        raise TypeError
    found = copy.copy(mapping)
    for key, value in values.items():
        found[key] = value
    return found


def _made(mapping: Any, values: dict[Any, Any]) -> Any:
    """Return what the type of a mapping makes of a dict."""
    return type(mapping)(values)


# -- what a model is called with, and what it returns ------------------------------------------


def takes_keywords(model: torch.nn.Module, given: Sequence[Any]) -> bool:
    """Return whether a model is to get the items of its only input, a mapping, by name.

    It is where all keys are parameters of its ``forward``, and not one thing by chance. Where
    ``forward`` takes any keyword (``**kwargs``), one of them must be a parameter that has a name.
    """
    if len(given) != 1 or not isinstance(given[0], Mapping):
        return False
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
    keys = set(given[0])
    named = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    positional = any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        or parameter.kind is parameter.VAR_POSITIONAL
        for parameter in parameters.values()
    )
    if not positional:
        return True
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        keys &= named
    return bool(keys) and keys <= named and (len(given[0]) > 1 or len(named) > 1)


def loss_in(name: str, output: Any) -> Any:
    """Return the loss of an output: itself, or what lies under ``loss`` in it.

    Raises
    ------
    CaptureError
        If an output that could have a loss has none.
    """
    import torch

    keyed = isinstance(output, Mapping)
    if isinstance(output, torch.Tensor) or not (keyed or hasattr(output, "loss")):
        return output
    found = output.get("loss") if keyed else output.loss
    if found is None:
        msg = (
            f"{name}: there is no loss in the {type(output).__name__} that is returned; give the "
            "model its target (labels), or give a loss_fn"
        )
        raise CaptureError(msg)
    if not isinstance(found, torch.Tensor):
        msg = f"{name}: expected a loss that is a tensor, got a {type(found).__name__}"
        raise CaptureError(msg)
    return found
