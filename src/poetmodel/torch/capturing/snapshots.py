"""Whether one graph of a step, captured now, stands for all later steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from poetmodel.torch.capturing.front import StepFront, find_line
from poetmodel.torch.capturing.inputs import copy_inputs, flatten, takes_keywords, unflatten
from poetmodel.torch.capturing.passes import Passes, settle, settling_message
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.torch.capturing.inputs import Inputs


def check_snapshot(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> None:
    """Raise `CaptureError` if one graph of a step does not compute what later steps compute.

    State that settles in the first pass, such as a flag or a table, is accepted. Executes forward
    passes; restores modules, tensors and random generators, but no other Python objects.
    """
    flat_inputs, spec = flatten(inputs)
    batch = unflatten(flat_inputs, spec)
    arguments = inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    front = StepFront(
        name,
        model,
        loss_fn,
        uses_keywords=takes_keywords(model, arguments),
    )
    parts = [part for part in (model, loss_fn) if isinstance(part, torch.nn.Module)]
    passes = Passes(name, torch.nn.ModuleList(parts), flat_inputs)

    def forward() -> None:
        front.execute_eagerly(copy_inputs(batch))

    refusal = None
    try:
        try:
            with passes.generator_states.restore_at_end():
                front.capture(batch)
        except CaptureError as error:
            refusal = error
        if refusal is not None:
            # What the first pass computes once, such as a cached property, need not be traced.
            passes.execute(forward)
            passes.snapshot.restore(keeps_new=True)
            passes.execute(lambda: front.record_readings(copy_inputs(batch)))
            passes.snapshot.restore(keeps_new=True)
        with passes.generator_states.restore_at_end():  # PyTorch 2.14 captures draws
            capture = front.capture(batch)
            _, tensors = front.find(batch)
        if foreign := capture.fresh_inputs(tensors):
            line = find_line(foreign[0])
            where = f" at {line}" if line else ""
            raise CaptureError(
                f"{name}: Python computes a number{where} anew in each step, and one graph has "
                "that of its capture; make it an input or a buffer"
            )
        passes.execute(forward)
        _, reasons, is_settled = settle(front, capture, batch, lambda: passes.execute(forward))
        if not is_settled:
            raise CaptureError(settling_message(name, reasons))
    finally:
        passes.snapshot.restore(keeps_new=refusal is not None)
