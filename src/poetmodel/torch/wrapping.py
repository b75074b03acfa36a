"""What training loops of other libraries share: a compiled step for their model, and checks."""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypedDict
from unittest.mock import PropertyMock, patch

import torch

from poetmodel.errors import InputError
from poetmodel.torch.compilation import Step, compile
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


class TrainingLoop:
    """A training loop with a step compiled at the first batch of a model."""

    def _prepare(
        self, name: str, remedy: str, *, ram: str | int, whole_step: bool, **options: Any
    ) -> None:
        """Set the options; refuse several processes by a message about `name` with `remedy`."""
        process_count = int(os.environ.get("WORLD_SIZE") or 1)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            process_count = torch.distributed.get_world_size()
        if process_count > 1:
            raise InputError(
                f"{name}: one of {process_count} processes, but a compiled step trains in a single "
                f"process: {remedy}"
            )
        self._options: dict[str, Any] = {"ram": ram, "dynamic": "retrace", **options}
        self._whole_step = whole_step
        self.step: Step | None = None
        """The last compiled step, also after it is closed; None before the first batch."""
        self._compiled_model: torch.nn.Module | None = None
        """The model of the step; None if a new step must be compiled."""

    @abstractmethod
    def _optimizer_options(self) -> dict[str, Any]:
        """Return the options for optimizer and clipping of a whole step."""

    def _step_of(self, model: torch.nn.Module, loss: Callable[..., Any], batch: Any) -> Step:
        """Return the step of a model; for another one than before, close it and compile."""
        if self.step is None or self._compiled_model is not model:
            if self.step is not None:
                self.step.close()
            optimizer_options = self._optimizer_options() if self._whole_step else {}
            module = loss_module(model, loss)
            self.step = compile(module, None, batch, **self._options, **optimizer_options)
            self._compiled_model = model
        return self.step

    def _close_whole_step(self) -> None:
        """Close a step with updates, which moves its state to RAM."""
        if self._whole_step and self.step is not None:
            self.step.close()
            self._compiled_model = None


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
