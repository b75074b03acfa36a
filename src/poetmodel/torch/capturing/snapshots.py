"""Whether one graph of a step, captured now, stands for all later steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.front import Changed, StepFront, find_line
from poetmodel.torch.capturing.inputs import copy_inputs, flatten, takes_keywords, unflatten
from poetmodel.torch.capturing.passes import Passes
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.torch.capturing.inputs import Inputs

_MAX_PASSES: Final = 2
"""Number of further passes in which what forward reads must be as the pass before left it."""


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
            front.capture(batch)
        except CaptureError as error:
            refusal = error
        if refusal is not None:
            # What the first pass computes once, such as a cached property, need not be traced.
            passes.execute(forward)
            passes.snapshot.restore(keeps_new=True)
            passes.execute(lambda: front.record_readings(copy_inputs(batch)))
            passes.snapshot.restore(keeps_new=True)
        capture = front.capture(batch)
        if foreign := capture.fresh_inputs(front.find(batch)[1]):
            line = find_line(foreign[0])
            where = f" at {line}" if line else ""
            raise CaptureError(
                f"{name}: Python computes a number{where} anew in each step, and one graph has "
                "that of its capture; make it an input or a buffer"
            )
        _check_settled(name, front, batch, lambda: passes.execute(forward))
    finally:
        passes.snapshot.restore(keeps_new=refusal is not None)


def _check_settled(
    name: str, front: StepFront, batch: Sequence[Any], execute_pass: Callable[[], object]
) -> None:
    """Raise `CaptureError` if each forward pass changes what it reads."""
    reasons: tuple[str, ...] = ()
    for _ in range(_MAX_PASSES):
        last = front.captures[-1]
        execute_pass()
        try:
            capture = front.find(batch)[0]
        except Changed as change:
            reasons = reasons or change.reasons
            front.capture(batch)
        else:
            if capture is last:
                return
    change_text = re.sub(
        r" was (.*?) and is (.*?), read at ", r" from \1 to \2 at ", reasons[0], count=1
    )
    raise CaptureError(
        f"{name}: forward changes {change_text}, and one graph cannot follow; make it a buffer or "
        "an input, or leave the change out"
    )
