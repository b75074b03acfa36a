"""Hugging Face: a ``transformers.Trainer`` whose training steps keep a RAM budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
import transformers

from poetmodel.errors import InputError
from poetmodel.torch.compilation import Step, compile
from poetmodel.torch.wrapping import OPTIONS, frozen, refuse_processes, with_loss

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMEDY: Final = (
    "model.compile(backend=poetmodel.torch.backend(ram=...), fullgraph=True, dynamic=False), then "
    "transformers.Trainer(model=model, ...)"
)


class Trainer(transformers.Trainer):  # type: ignore[misc, unused-ignore]
    """A ``transformers.Trainer`` that compiles its training step on the first batch.

    Forward pass, loss and backward pass keep the budget. All else is as ever: accumulation of
    gradients, clipping, schedules, evaluation, callbacks, checkpoints and how they are resumed, and
    a ``compute_loss`` of a subclass. Batches of other shapes, such as the last one of an epoch, are
    compiled for when they come.

    Parameters
    ----------
    *args
        As for ``transformers.Trainer``.
    ram : str or int
        As for `poetmodel.torch.compile`.
    whole_step : bool
        Make the updates of the optimizer, and clipping, a part of the step: the budget counts
        parameters, gradients and the state of the optimizer too. One that `poetmodel.torch.trace`
        takes, without accumulation; no norm of gradients is logged.
    **options
        Other parameters of `poetmodel.torch.compile`, such as ``storage``, and of
        ``transformers.Trainer``. By default ``dynamic="retrace"``.

    Raises
    ------
    CaptureError, BudgetError, NoScheduleError, InputError
        In ``train()``, as by `poetmodel.torch.compile`; at once in several processes.
    """

    def __init__(
        self, *args: Any, ram: str | int, whole_step: bool = False, **options: Any
    ) -> None:
        refuse_processes("poetmodel's Trainer", _REMEDY)
        own = {key: options.pop(key) for key in OPTIONS.intersection(options)}
        self._options: dict[str, Any] = {"ram": ram, "dynamic": "retrace", **own}
        self.step: Step | None = None
        """The compiled step; None before the first batch."""
        self._stepped: torch.nn.Module | None = None
        self._whole_step = whole_step
        super().__init__(*args, **options)
        if whole_step and self.args.gradient_accumulation_steps > 1:
            raise InputError(
                "whole_step: each step updates at once, and gradient_accumulation_steps is "
                f"{self.args.gradient_accumulation_steps}; leave one of the two out"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ever; state that is on storage comes back to RAM at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._whole_step and self.step is not None:
                self.step.close()
                self._stepped = None

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run one step on a batch: fill ``.grad`` (accumulating), and return the loss."""
        model.train()
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch)
        # As tensors these are no part of the program: other numbers need no other step.
        accumulated = torch.tensor(self.current_gradient_accumulation_steps)
        batch = (dict(self._prepare_inputs(inputs)), num_items_in_batch, accumulated)
        if self.step is None or self._stepped is not model:
            if self.step is not None:
                self.step.close()
            self.step = compile(
                with_loss(model, self._loss), None, batch, **self._options, **self._updates()
            )
            self._stepped = model
        loss: torch.Tensor = self.step(*batch)
        return loss

    def _updates(self) -> dict[str, Any]:
        """Return the optimizer of the step, and how it clips, where they are a part of it."""
        if not self._whole_step:
            return {}
        # Accelerate wraps it.
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return {"optimizer": optimizer, "clip_grad_norm": self.args.max_grad_norm or None}

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return None if self._whole_step else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        return None if self._whole_step else super()._get_grad_norm(model, grad_norm)

    def _loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | None,
        accumulated: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tensor that ``transformers.Trainer.training_step`` differentiates."""
        losses: list[torch.Tensor] = []

        def backward(loss: torch.Tensor, **_: Any) -> None:
            losses.append(loss)

        method = f"{type(model).__name__}: compute_loss"
        with (
            frozen(self.state, "epoch", "global_step", method=method),
            patch.object(self.accelerator, "backward", backward),
            patch.object(self, "current_gradient_accumulation_steps", accumulated),
        ):
            super().training_step(model, inputs, num_items_in_batch)
        (loss,) = losses
        return loss
