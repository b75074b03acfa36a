"""Lightning: a strategy for automatic optimization whose training steps keep a RAM budget."""

from __future__ import annotations

from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, Unpack
from unittest.mock import patch

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from poetmodel.errors import InputError, listed
from poetmodel.torch.capturing.inputs import find_loss
from poetmodel.torch.compilation import Step, compile
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.wrapping import (
    OPTIONS,
    LoopKeywords,
    frozen,
    refuse_processes,
    with_loss,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_REMEDY: Final = (
    "compile the network inside of the module, "
    "self.net.compile(backend=poetmodel.torch.backend(ram=...), fullgraph=True, dynamic=False), "
    "and pass strategy='ddp'"
)


class Strategy(SingleDeviceStrategy):  # type: ignore[misc, unused-ignore]
    """A strategy for one processor that compiles ``training_step`` on the first batch.

    ``lightning.Trainer(strategy=Strategy(ram="60%"))``. Forward pass, loss and backward pass keep
    the budget. Accumulation, clipping, schedules, validation, callbacks, hooks and checkpoints are
    Lightning's. The Python code of ``training_step`` runs once for each compilation; what it logs
    and returns is that of each batch. Batches of other shapes are compiled for when they come.

    Parameters
    ----------
    ram : str or int
        As for `poetmodel.torch.compile`.
    whole_step : bool
        Make the updates of the optimizer, and clipping, a part of the step: the budget counts
        parameters, gradients and the state of the optimizer too. One optimizer that
        `poetmodel.torch.trace` takes, without accumulation; hooks find no gradients.
    accelerator, checkpoint_io, precision_plugin
        As for ``lightning.pytorch.strategies.SingleDeviceStrategy``.
    **options
        Other parameters of `poetmodel.torch.compile`, such as ``storage``. By default
        ``dynamic="retrace"``.

    Raises
    ------
    CaptureError, BudgetError, NoScheduleError, InputError
        In ``fit()``, as by `poetmodel.torch.compile`; at once in several processes.
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
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"Strategy: unknown parameters: {listed(sorted(unknown))}")
        refuse_processes("Strategy", _REMEDY)
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self._options: dict[str, Any] = {"ram": ram, "dynamic": "retrace", **options}
        self.step: Step | None = None
        """The compiled step; None before the first batch."""
        self._stepped: Any = None
        self._whole_step = whole_step
        self._loop: Any = None
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Those of a step that wait for the backward pass of Lightning."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward pass; return what ``training_step`` returns, detached."""
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            raise CaptureError(
                f"{type(module).__name__}: manual optimization does its backward pass itself; "
                "compile a step of the model (poetmodel.torch.compile) and call it in training_step"
            )
        self._loop = trainer = module.trainer
        every = trainer.accumulate_grad_batches
        batch, *places = (*args, *kwargs.values())
        given = {
            "batch": batch,
            # As tensors these are no part of the program: other numbers need no other step.
            "places": list(map(torch.tensor, places)),
            "every": torch.tensor(every),
        }
        # Gradients that Lightning clears after the forward pass, and before the backward pass.
        begins = trainer.fit_loop.batch_idx % every == 0
        if begins:
            module.zero_grad(set_to_none=True)
        with patch.object(module, "_trainer", None):  # no part of the model
            if self.step is None or self._stepped is not module:
                updates = self._updates(trainer) if self._whole_step else {}
                self.step = compile(
                    with_loss(module, self._loss), None, given, **self._options, **updates
                )
                self._stepped = module
            output = self.step(**given)
        if begins:
            self._gradients = [(p, p.grad) for p in module.parameters() if p.grad is not None]
            module.zero_grad(set_to_none=True)
        for entry in output["logged"]:
            module.log(**entry)
        return output["returned"]

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hand out the gradients of the step, with all hooks around it."""

        def hand_out(*_: Any, **__: Any) -> None:
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            self._gradients = []

        with patch.object(self.precision_plugin, "backward", hand_out):
            loss: torch.Tensor = super().backward(closure_loss, *args, **kwargs)
        return loss

    def teardown(self) -> None:
        """End as ever; state that is on storage comes back to RAM."""
        if self._whole_step and self.step is not None:
            self.step.close()
            self._stepped = None
        super().teardown()

    def _updates(self, trainer: Any) -> dict[str, Any]:
        """Return the optimizer of the step, and how it clips.

        Raises `InputError` where a step cannot do what the trainer is to.
        """
        faults = []
        if len(self.optimizers) != 1:
            faults.append(f"expected one optimizer, got {len(self.optimizers)}")
        if trainer.accumulate_grad_batches > 1:
            faults.append("each step updates at once; leave accumulate_grad_batches out")
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            faults.append("gradients can be clipped by their norm, not by value")
        if faults:
            raise InputError(f"whole_step: {fault}" for fault in faults)
        return {
            "optimizer": self.optimizers[0],
            "clip_grad_norm": trainer.gradient_clip_val or None,
        }

    def _loss(
        self, module: Any, batch: Any, places: list[torch.Tensor], every: torch.Tensor
    ) -> dict[str, Any]:
        """Return the tensor to differentiate, the returned value, and the logged values."""
        with self._attached(module) as logged, self.precision_plugin.train_step_context():
            returned = module.training_step(batch, *places)
        name = type(module).__name__
        if returned is None:
            raise CaptureError(
                f"{name}: training_step returned None, and a compiled step cannot be left out; "
                "leave such batches out of the data, or return a loss of 0 that has a gradient"
            )
        return {"loss": find_loss(name, returned) / every, "returned": returned, "logged": logged}

    @contextmanager
    def _attached(self, module: Any) -> Iterator[list[dict[str, Any]]]:
        """Give a module its trainer for a while; yield what it logs meanwhile.

        Raises `CaptureError` where it logs or reads what would stay as it is now.
        """
        name, trainer = type(module).__name__, self._loop
        known, logged = signature(type(module).log), []

        def log(*args: Any, **kwargs: Any) -> None:
            entry = known.bind(module, *args, **kwargs).arguments
            del entry["self"]
            if not isinstance(entry["value"], torch.Tensor):
                raise CaptureError(
                    f"{name}: training_step logs {entry['name']!r}, a "
                    f"{type(entry['value']).__name__}, which would stay as it is in each step; log "
                    "a tensor, or log it outside of training_step (on_train_batch_end)"
                )
            logged.append(entry)

        with (
            patch.object(module, "_trainer", trainer),
            patch.object(module, "log", log),
            frozen(trainer, "current_epoch", "global_step", method=f"{name}: training_step"),
        ):
            yield logged
