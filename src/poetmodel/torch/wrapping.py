"""A user's model and the loss function of another library's training loop, as one module."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypedDict
from unittest.mock import PropertyMock, patch

import torch

from poetmodel.errors import InputError
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from poetmodel.device import Device


class LoopKeywords(TypedDict, total=False):
    """Options of `compile` for training loops, which accumulate, update and clip by themselves."""

    storage: str | Path | None
    paging: bool | None
    recompute: bool
    device: str | Device | None
    minimize: str | None
    deadline: str | float | None
    time_limit: float
    gap: float
    rollback: bool
    dynamic: str
    cache: str | Path | bool


OPTIONS: Final = frozenset(LoopKeywords.__annotations__)


def refuse_processes(name: str, remedy: str) -> None:
    """Raise `InputError` if this process is one of several that train together.

    Parameters
    ----------
    name : str
        The subject of the message.
    remedy : str
        Advice for training in several processes.
    """
    count = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        count = torch.distributed.get_world_size()
    if count > 1:
        raise InputError(
            f"{name}: one of {count} processes, but a compiled step trains in a single process: "
            f"{remedy}"
        )


@contextmanager
def forbid_reads(owner: object, *keys: str, method: str) -> Iterator[None]:
    """Raise `CaptureError` inside if a method reads these counters of `owner`.

    A compiled step would repeat the values that the counters had during the capture.
    """
    with ExitStack() as stack:
        for key in keys:
            error = CaptureError(
                f"{method} reads {key}, whose value would never change in a compiled step; store "
                "it in a buffer of the model, and set that between steps"
            )
            forbidden_property = PropertyMock(side_effect=error)
            stack.enter_context(patch.object(type(owner), key, forbidden_property))
        yield


def loss_module(model: torch.nn.Module, loss: Callable[..., Any]) -> torch.nn.Module:
    """Return a module that contains the model, and whose ``forward`` is the loss of a batch."""

    class Wrapped(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.train(model.training)

        def forward(self, *inputs: Any, **named: Any) -> Any:
            return loss(model, *inputs, **named)

    Wrapped.__name__ = type(model).__name__
    return Wrapped()
