"""A user's model with what another library's loop makes its loss with, as one module."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.compiled import CompileOptions
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OPTIONS: Final = frozenset(field.name for field in fields(CompileOptions)) - {
    "accumulate", "clip_grad_norm", "optimizer"
}  # fmt: skip
"""Parameters of `compile` for such loops; accumulation, updates and clipping are their own."""


def frozen(name: str, method: str, key: str) -> CaptureError:
    """Return the error for a counter that Python code reads, and that no step would read again."""
    return CaptureError(
        f"{name}: {method} reads {key}, which would stay as it is in each step; keep it in a "
        "buffer of the model that is set between steps"
    )


class Refusing:
    """Stands for an object some of whose attributes raise an error."""

    def __init__(self, wrapped: Any, errors: Mapping[str, Exception]) -> None:
        self._wrapped = wrapped
        self._errors = errors

    def __getattr__(self, key: str) -> Any:
        if key in self._errors:
            raise self._errors[key]
        return getattr(self._wrapped, key)


def with_loss(model: torch.nn.Module, loss: Callable[..., Any]) -> torch.nn.Module:
    """Return a module that holds a model, is called like it, and returns its loss of a batch."""

    class Wrapped(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.train(model.training)

        def forward(self, *inputs: Any, **named: Any) -> Any:
            return loss(model, *inputs, **named)

    Wrapped.__name__ = type(model).__name__
    return Wrapped()
