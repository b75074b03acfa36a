"""Hugging Face: a ``transformers.Trainer`` whose training steps stay within a RAM budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from poetmodel.errors import InputError
from poetmodel.torch.errors import convert_missing_packages

with convert_missing_packages("poetmodel.torch.huggingface", install="transformers[torch]"):
    import torch
    import transformers

    from poetmodel.torch.wrapping import LOOP_OPTIONS, TrainingLoop, forbid_reads

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMEDY: Final = (
    "model.compile(backend=poetmodel.torch.backend(ram=...), fullgraph=True, dynamic=False), then "
    "transformers.Trainer(model=model, ...)"
)
"""Advice in the message for training in several processes."""


class Trainer(TrainingLoop, transformers.Trainer):  # type: ignore[misc, unused-ignore]
    """A ``transformers.Trainer`` that compiles its training step on the first batch.

    Forward pass, loss and backward pass stay within the budget. Other behaviour is unchanged:
    accumulation of gradients, clipping, schedules, evaluation, callbacks, checkpoints and resuming,
    and ``compute_loss`` of a subclass, whose Python code is executed only during compilation. By
    default, batches of other shapes, such as the last one of an epoch, are compiled when they first
    occur.

    Parameters
    ----------
    *args
        As for ``transformers.Trainer``.
    ram : str or int
        As for `poetmodel.torch.compile`.
    whole_step : bool
        Include clipping and the optimizer's updates in the step: the budget also counts parameters,
        gradients, buffers, inputs and the state of the optimizer. Needs an optimizer that
        `poetmodel.torch.trace` supports, and no accumulation; the norm of gradients is not logged.
    **options
        Other parameters of `poetmodel.torch.compile`, such as ``storage``, except ``accumulate``,
        ``optimizer`` and ``clip_grad_norm``; and those of ``transformers.Trainer``. By default
        ``dynamic="retrace"``.

    Raises
    ------
    CaptureError, BudgetError, NoScheduleError, InputError, PageError
        In ``train()``, as by `poetmodel.torch.compile` and its steps. `CaptureError` also if
        ``compute_loss`` reads the epoch or the step count. In the constructor, `InputError` if
        several processes train, or gradients accumulate with `whole_step`.
    """

    def __init__(
        self, *args: Any, ram: str | int, whole_step: bool = False, **options: Any
    ) -> None:
        compile_options = {key: options.pop(key) for key in LOOP_OPTIONS.intersection(options)}
        self._prepare(
            "poetmodel's Trainer", _REMEDY, ram=ram, whole_step=whole_step, **compile_options
        )
        self._recorded_loss: Any = None
        """The loss to differentiate, between two functions of `_loss`."""

        def record_loss(loss: torch.Tensor, **_: Any) -> None:
            self._recorded_loss = loss

        self._record_loss = record_loss
        super().__init__(*args, **options)
        if whole_step and self.args.gradient_accumulation_steps > 1:
            raise InputError(
                "whole_step: each step updates at once, and gradient_accumulation_steps is "
                f"{self.args.gradient_accumulation_steps}; leave one of the two out"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer`` does; with `whole_step`, finally close the step.

        Also closes it after an exception. Closing moves all state to RAM; `step` remains the closed
        step. The next training then compiles a new step; without `whole_step`, it uses the same
        step again for the same model.
        """
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_whole_step()

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Execute one step on a batch, and return the loss, scaled as by ``transformers.Trainer``.

        Sets `model`, and an optimizer that has modes, to training mode before the step.
        Adds to the gradients in ``.grad``; with `whole_step`, updates parameters instead. Compiles
        the step on the first batch, and again for another model, or after `train` has closed the
        step. Closes the previous step before it compiles a new one.
        """
        model.train()
        train_optimizer = getattr(self.optimizer, "train", None)
        if callable(train_optimizer):
            train_optimizer()
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch)
        # Counts as tensors are inputs: other values need no new compilation.
        accumulated_batches = torch.tensor(self.current_gradient_accumulation_steps)
        batch = (dict(self._prepare_inputs(inputs)), num_items_in_batch, accumulated_batches)
        method = f"{type(model).__name__}: compute_loss"
        with (
            forbid_reads(self.state, "epoch", "global_step", method=method),
            patch.object(self, "current_gradient_accumulation_steps", accumulated_batches),
        ):
            loss: torch.Tensor = self._step_of(model, self._loss, batch)(*batch)
        return loss

    def _optimizer_options(self) -> dict[str, Any]:
        """Return the options for optimizer and clipping."""
        # Accelerate wraps the optimizer.
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return {"optimizer": optimizer, "clip_grad_norm": self.args.max_grad_norm or None}

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """Clip gradients and return their norm; with `whole_step`, do neither and return None."""
        return None if self._whole_step else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm for the log; None with `whole_step`, which retains no gradients."""
        return None if self._whole_step else super()._get_grad_norm(model, grad_norm)

    def _loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | None,
        accumulated_batches: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss that ``transformers.Trainer.training_step`` differentiates.

        Omits emptying an accelerator's cache, which reads the step count.
        """
        # TorchDynamo traces assignments, and no function of unittest.mock.
        self.current_gradient_accumulation_steps = accumulated_batches
        empty_cache_steps = self.args.torch_empty_cache_steps
        self.args.torch_empty_cache_steps = None
        self.accelerator.backward = self._record_loss
        has_modes = hasattr(self.optimizer, "train")
        if has_modes:
            self.optimizer.train = None
        try:
            super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.args.torch_empty_cache_steps = empty_cache_steps
            del self.accelerator.backward
            if has_modes:
                del self.optimizer.train
        loss: torch.Tensor = self._recorded_loss
        self._recorded_loss = None
        return loss
