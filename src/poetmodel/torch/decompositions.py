"""Decompositions: a capture records the operators that eager runs, not their replacements."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIXES: Final = ("upsample_", "_upsample_")
_NAMES: Final = (
    "gru",
    "hardshrink",
    "istft",
    "lstm",
    "matmul",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "rnn_relu",
    "rnn_tanh",
    "softshrink",
    "stft",
)
"""Operators that a capture would decompose into others, with other roundings or strides."""


@contextmanager
def native_operators() -> Iterator[None]:
    """Leave operators whole that a capture would decompose otherwise than eager does.

    Notes
    -----
    While it traces, PyTorch's dispatcher looks for Python kernels of an operator first. Some
    put other operators in place of one: ``upsample_nearest2d`` becomes an index, whose gradient
    lies otherwise in memory, so that sums of it run in another order. The kernels that stay are
    those that a capture needs (batch norm), and those that compute the very same.
    """
    taken: list[tuple[Any, Any, Any]] = []
    for operator in _operators():
        for key in _keys():
            if key in operator.py_kernels:
                taken.append((operator, key, operator.py_kernels.pop(key)))
        operator._dispatch_cache.clear()  # noqa: SLF001 - no other way
    try:
        yield
    finally:
        for operator, key, kernel in taken:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()  # noqa: SLF001 - as above


def _operators() -> Iterator[Any]:
    import torch
    import torch._decomp  # registers the kernels

    for name in dir(torch.ops.aten):
        if name in _NAMES or name.startswith(_PREFIXES):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                yield getattr(packet, overload)


def _keys() -> tuple[Any, ...]:
    import torch

    keys = torch._C.DispatchKey  # noqa: SLF001 - as PyTorch's own registrations
    return (keys.Autograd, keys.CompositeImplicitAutograd)
