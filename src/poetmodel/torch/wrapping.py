"""Helpers for training loops of other libraries: model and loss as one module, and checks."""

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
    """Options of `compile` in training loops, which accumulate, clip and update by themselves."""

    storage: str | Path | None
    paging: bool | None
    recompute: bool
    device: str | Device | None
    minimize: str | None
    deadline: str | float | None
    time_limit: float | None
    gap: float | None
    steps: int
    rollback: bool
    dynamic: str
    cache: str | Path | bool


LOOP_OPTIONS: Final = frozenset(LoopKeywords.__annotations__)
"""Names of the options in `LoopKeywords`."""


def refuse_processes(name: str, remedy: str) -> None:
    """Raise `InputError`, about `name` and with `remedy`, if several processes train together."""
    process_count = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        process_count = torch.distributed.get_world_size()
    if process_count > 1:
        raise InputError(
            f"{name}: one of {process_count} processes, but a compiled step trains in a single "
            f"process: {remedy}"
        )


@contextmanager
def forbid_reads(owner: object, *attribute_names: str, method: str) -> Iterator[None]:
    """Let reading or setting attributes of `owner`, which are counters, raise `CaptureError`.

    Properties of its class replace these attributes, also in other instances. `method` is the
    reader in the message.
    """
    with ExitStack() as stack:
        for attribute_name in attribute_names:
            error = CaptureError(
                f"{method} reads {attribute_name}, whose value would never change in a compiled "
                "step; store it in a buffer of the model, and set that between steps"
            )
            forbidden_property = PropertyMock(side_effect=error)
            stack.enter_context(patch.object(type(owner), attribute_name, forbidden_property))
        yield


def loss_module(model: torch.nn.Module, loss: Callable[..., Any]) -> torch.nn.Module:
    """Return a module that contains the model; ``forward(*batch)`` is ``loss(model, *batch)``."""

    class LossModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.training = model.training  # `train` would set the modes of submodules

        def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
            return loss(model, *inputs, **named_inputs)

    LossModule.__name__ = type(model).__name__
    return LossModule()
