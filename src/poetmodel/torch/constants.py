"""Constants: tensors that depend on no input, parameter or buffer have values in a capture too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.failures import RAISED
from poetmodel.torch.measures import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

LARGEST: Final = 2**20
"""Constants of more elements are not kept [elements]."""

_ATTRIBUTE: Final = "poetmodel_constant"
"""Under which a fake tensor holds its value."""

_FROM_NOTHING: Final = ("arange", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor")
_FROM_A_FORM: Final = ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
"""Operators that read nothing of a tensor but its form."""
_LITERAL: Final = ("lift_fresh", "lift_fresh_copy")
"""Operators that take the numbers of ``torch.tensor([1, 2])``."""
_MAKERS: Final = frozenset((*_FROM_NOTHING, "tril_indices", "triu_indices", "zeros"))


def real_constants(func: Any, args: Any, keywords: Any) -> Any:
    """Return what an operation gives if its inputs are constants; None where they are not.

    Notes
    -----
    Constants in place are constants still; what is written with other values is one no more.
    """
    import torch
    from torch.utils import _pytree
    from torch.utils._mode_utils import no_dispatch

    inputs = tensors_in((args, keywords))
    name = func.overloadpacket.__name__
    if not inputs and name not in _MAKERS:
        return None
    form = name in _FROM_A_FORM
    if form and any(tensor.numel() > LARGEST for tensor in inputs):
        return None
    known = all(_value(tensor, func) is not None for tensor in inputs)
    if torch.Tag.nondeterministic_seeded in func.tags or not (known or form):
        if func._schema.is_mutable:  # noqa: SLF001 - what is written into is known by it alone
            _forget(inputs)
        return None

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        value = _value(leaf, func)
        return torch.empty(leaf.shape, dtype=leaf.dtype) if value is None else value

    with no_dispatch(), torch.no_grad():
        try:
            own_args, own_keywords = _pytree.tree_map(real, (args, keywords))
            return func(*own_args, **own_keywords)
        except RAISED:
            return None


def _value(tensor: torch.Tensor, func: Any) -> torch.Tensor | None:
    """Return the value of a fake tensor, where it is known."""
    import torch

    if func.overloadpacket.__name__ in _LITERAL and type(tensor) is torch.Tensor:
        return tensor.clone()
    value: torch.Tensor | None = getattr(tensor, _ATTRIBUTE, None)
    gone = value is not None and value.numel() and not value.untyped_storage().nbytes()
    return None if gone else value


def remember(value: Any, constants: Any) -> None:
    """Let the outputs of an operation hold their values, where these are known."""
    import torch
    from torch.utils import _pytree

    if constants is None:
        return
    pairs = zip(_pytree.tree_leaves(value), _pytree.tree_leaves(constants), strict=False)
    for fake, real in pairs:
        if isinstance(fake, torch.Tensor) and fake.shape == real.shape and real.numel() <= LARGEST:
            setattr(fake, _ATTRIBUTE, real)


def _forget(tensors: Iterable[torch.Tensor]) -> None:
    """Let tensors hold no value, nor those that share memory with them."""
    for tensor in tensors:
        value = getattr(tensor, _ATTRIBUTE, None)
        if value is not None:
            value.untyped_storage().resize_(0)
