"""Lightning: a strategy for automatic optimization with training steps within a RAM budget."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Final, Unpack
from unittest.mock import patch

from poetmodel.errors import InputError, join_names
from poetmodel.torch.errors import CaptureError, convert_missing_packages

with convert_missing_packages("poetmodel.torch.lightning", install="lightning"):
    import torch
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from poetmodel.torch.capturing.inputs import find_loss
    from poetmodel.torch.wrapping import LOOP_OPTIONS, LoopKeywords, TrainingLoop, forbid_reads

if TYPE_CHECKING:
    from collections.abc import Callable

_REMEDY: Final = (
    "compile the network inside of the module, "
    "self.net.compile(backend=poetmodel.torch.backend(ram=...), fullgraph=True, dynamic=False), "
    "and pass strategy='ddp'"
)
"""Advice in the message for training in several processes."""


class Strategy(TrainingLoop, SingleDeviceStrategy):  # type: ignore[misc, unused-ignore]
    """A strategy for one CPU process that compiles ``training_step`` on the first batch.

    ``lightning.Trainer(strategy=Strategy(ram="60%"))``. Forward pass, loss and backward pass stay
    within the budget. Lightning itself does updates, clipping, schedules, validation, callbacks,
    hooks and checkpoints. Gradients accumulate over ``accumulate_grad_batches`` batches. The Python
    code of ``training_step`` is executed only during compilation; its logged and returned values
    are those of each batch. By default, batches of other shapes are compiled when they first occur.

    Parameters
    ----------
    ram : str or int
        As for `poetmodel.torch.compile`.
    whole_step : bool
        Include clipping and the optimizer's updates in the step: the budget also counts parameters,
        gradients, buffers, inputs and the state of the optimizer. Needs one optimizer that
        `poetmodel.torch.trace` supports, no accumulation, and no clipping by value; in hooks,
        gradients are None.
    accelerator, checkpoint_io, precision_plugin
        As for ``lightning.pytorch.strategies.SingleDeviceStrategy``.
    **options
        Other parameters of `poetmodel.torch.compile`, such as ``storage``, except ``accumulate``,
        ``optimizer`` and ``clip_grad_norm``. By default ``dynamic="retrace"``.

    Raises
    ------
    CaptureError, BudgetError, NoScheduleError, InputError, PageError
        In ``fit()``, as by `poetmodel.torch.compile` and its steps. `CaptureError` also for manual
        optimization, and if ``training_step`` returns None, logs a value that is no tensor, or
        reads the epoch or the step count. `InputError` also if `whole_step` does not support the
        trainer's options, and in the constructor if several processes train.
    TypeError
        In the constructor, for an unknown option.
    """

    def __init__(
        self,
        *,
        ram: str | int,
        whole_step: bool = False,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Unpack[LoopKeywords],
    ) -> None:
        if unknown_names := options.keys() - LOOP_OPTIONS:
            raise TypeError(f"Strategy: unknown parameters: {join_names(sorted(unknown_names))}")
        self._prepare("Strategy", _REMEDY, ram=ram, whole_step=whole_step, **options)
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self._current_trainer: Any = None
        """The trainer of the current batch."""
        self._log: Any = None
        """What replaces the ``log`` of the compiled module in the traced step."""
        self._logged_entries: list[dict[str, Any]] = []
        """Arguments of the calls of ``log`` in the traced step."""
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """(parameter, gradient) pairs of the first accumulated batch, until `backward`."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Execute forward and backward pass; return the result of ``training_step``, detached.

        Compiles on the first batch of a module, after closing the previous step, and on the first
        batch after `teardown` has closed the step. Logs the values of the batch. On the first of
        ``accumulate_grad_batches`` batches, clears ``.grad`` before the step, then moves the new
        gradients from ``.grad`` to a list for `backward`, because Lightning clears ``.grad`` before
        `backward`; later batches add theirs to ``.grad``. With `whole_step`, the step updates the
        parameters and leaves no gradients. Raises `CaptureError` for manual optimization, and the
        errors of compilation and of the step.
        """
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            raise CaptureError(
                f"{type(module).__name__}: manual optimization executes its own backward pass; "
                "compile a step of the model (poetmodel.torch.compile) and call it in training_step"
            )
        self._current_trainer = trainer = module.trainer
        accumulated_batches = trainer.accumulate_grad_batches
        batch, *other_arguments = (*args, *kwargs.values())
        step_inputs = {
            "batch": batch,
            # Numbers as tensors are inputs: other values need no new compilation.
            "other_arguments": list(map(torch.tensor, other_arguments)),
            "accumulated_batches": torch.tensor(accumulated_batches),
        }
        # Lightning clears gradients between `training_step` and `backward`.
        is_first = trainer.fit_loop.batch_idx % accumulated_batches == 0
        if is_first:
            module.zero_grad(set_to_none=True)
        method = f"{type(module).__name__}: training_step"
        with (
            patch.object(module, "_trainer", None),  # exclude the trainer from the capture
            forbid_reads(trainer, "current_epoch", "global_step", method=method),
        ):
            if self._compiled_model is not module:
                self._log = self._make_log(module)
            output = self._step_of(module, self._traced_training_step, step_inputs)(**step_inputs)
        if is_first:
            self._gradients = [
                (parameter, parameter.grad)
                for parameter in module.parameters()
                if parameter.grad is not None
            ]
            module.zero_grad(set_to_none=True)
        for entry in output["logged"]:
            module.log(**entry)
        return output["returned"]

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Execute Lightning's hooks, without a backward pass; return the loss, detached.

        Between the hooks, sets ``.grad`` to the gradients that `training_step` has stored, and
        clears its list. The list is empty after later accumulated batches: ``.grad`` then stays.
        """

        def set_gradients(*_: Any, **__: Any) -> None:
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            self._gradients = []

        with patch.object(self.precision_plugin, "backward", set_gradients):
            loss: torch.Tensor = super().backward(closure_loss, *args, **kwargs)
        return loss

    def teardown(self) -> None:
        """Tear down as Lightning does; with `whole_step`, first close the step.

        Closing moves state on storage to RAM. `step` remains the closed step until the next
        training compiles a new one.
        """
        self._close_whole_step()
        super().teardown()

    def _optimizer_options(self) -> dict[str, Any]:
        """Return the options ``optimizer`` and ``clip_grad_norm``; refuse those not supported."""
        trainer, errors = self._current_trainer, []
        if len(self.optimizers) != 1:
            errors.append(f"expected one optimizer, got {len(self.optimizers)}")
        if trainer.accumulate_grad_batches > 1:
            errors.append("each step updates at once; leave accumulate_grad_batches out")
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            errors.append("gradients can be clipped by their norm, not by value")
        if errors:
            raise InputError(f"whole_step: {error}" for error in errors)
        return {
            "optimizer": self.optimizers[0],
            "clip_grad_norm": trainer.gradient_clip_val or None,
        }

    def _traced_training_step(
        self,
        module: Any,
        batch: Any,
        other_arguments: list[torch.Tensor],
        accumulated_batches: torch.Tensor,
    ) -> dict[str, Any]:
        """Return ``loss`` (divided by the batches), ``returned`` (by the module) and ``logged``."""
        self._logged_entries = []
        # TorchDynamo traces assignments and removed items, and no function of unittest.mock.
        module._trainer = self._current_trainer  # noqa: SLF001
        module.__dict__["log"] = self._log
        try:
            with self.precision_plugin.train_step_context():
                step_result = module.training_step(batch, *other_arguments)
        finally:
            module._trainer = None  # noqa: SLF001 - attached outside of the capture
            del module.__dict__["log"]
        logged_entries, self._logged_entries = self._logged_entries, []
        name = type(module).__name__
        if step_result is None:
            raise CaptureError(
                f"{name}: training_step returned None, and a compiled step cannot be skipped; "
                "remove such batches from the data, or return a loss of 0 that has a gradient"
            )
        return {
            "loss": find_loss(name, step_result) / accumulated_batches,
            "returned": step_result,
            "logged": logged_entries,
        }

    def _make_log(self, module: Any) -> Callable[..., None]:
        """Return a function that appends the arguments of a call of ``log`` to the entries."""
        name = type(module).__name__
        _, *parameters = signature(type(module).log).parameters  # without self

        def log(*args: Any, **kwargs: Any) -> None:
            entry = {**dict(zip(parameters[: len(args)], args, strict=True)), **kwargs}
            if not isinstance(entry["value"], torch.Tensor):
                raise CaptureError(
                    f"{name}: training_step logs {entry['name']!r}, a "
                    f"{type(entry['value']).__name__}, which would never change in a compiled "
                    "step; log a tensor, or log it outside of training_step (on_train_batch_end)"
                )
            self._logged_entries.append(entry)

        return log
