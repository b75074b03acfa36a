"""Whether later passes compute what a capture computes, and where forward prevents it.

Dynamo names the line: it refuses to trace a draw or a clock, takes a number of Python anew in each
call, or has a guard of what forward changes.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from poetmodel.torch.capturing.front import (
    Capture,
    Changed,
    Refusal,
    StepFront,
    Unreplayable,
    find_line,
)
from poetmodel.torch.capturing.front_joint import is_same_graph
from poetmodel.torch.capturing.front_readings import ancestors
from poetmodel.torch.capturing.inputs import copy_inputs
from poetmodel.torch.capturing.passes import draw_message
from poetmodel.torch.errors import CaptureError, at_line
from poetmodel.torch.graph.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.capturing.passes import Passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The captures of a step whose first pass has been executed."""

    capture: Capture
    """The capture in the state before the first pass."""
    equal_captures: Sequence[Capture]
    """Captures in the states of later passes, if they have the same graph."""
    is_settled: bool
    """Whether forward stops changing what it reads."""


def capture_settled(
    front: StepFront,
    batch: Sequence[Any],
    passes: Passes,
    first_results: Sequence[torch.Tensor],
    *,
    follows_state: bool,
    is_snapshot: bool,
) -> Settled:
    """Capture a step, and execute passes until they change nothing that forward reads.

    Refuses state that forward changes in each pass; with `follows_state`, only outside of modules.
    If the graph `is_snapshot`, it must compute what later passes compute.
    """
    captured = _capture_or_record(front, batch, passes, first_results)
    if not _are_equal(first_results, passes.execute()):
        _refuse_other_results(front, captured, batch, passes)
    if not captured.is_guarded:
        passes.restore()
        return Settled(capture=captured, equal_captures=(), is_settled=True)
    further, reasons, is_settled = _settle(front, captured, batch, passes)
    if is_snapshot and is_settled:
        _refuse_stale(front, batch, passes, (captured, *further), reasons)
    passes.restore()
    if not is_settled and not follows_state:
        raise CaptureError(_settling_message(front.name, reasons))
    try:
        front.find(batch)
    except Changed as change:
        raise CaptureError(_settling_message(front.name, change.reasons)) from None
    equal_captures = [capture for capture in further if is_same_graph(captured, capture)]
    return Settled(capture=captured, equal_captures=equal_captures, is_settled=is_settled)


# -- captures --------------------------------------------------------------------------------------


def _capture_or_record(
    front: StepFront,
    batch: Sequence[Any],
    passes: Passes,
    first_results: Sequence[torch.Tensor],
) -> Capture:
    """Return a capture; if Dynamo refuses, one with the values that an eager pass reads."""
    try:
        return front.capture(batch)
    except Unreplayable:
        raise
    except CaptureError as error:
        refusal = error
    passes.execute(lambda: front.record_readings(copy_inputs(batch)))
    passes.restore(keeps_new=True)
    try:
        return front.capture(batch)
    except CaptureError as error:
        last_refusal = error
        passes.restore(keeps_new=False)  # a flag may say that a hook is there, which is not
        if not _are_equal(first_results, passes.execute()):
            cause = str(last_refusal).partition("; ")[0]
            raise CaptureError(f"{cause}, and {_OTHER_LOSS}") from refusal
        with suppress(CaptureError):
            front.capture(batch)  # in the state that a pass leaves
            advice = "only its first pass does this: call the model once, and compile it then"
            last_refusal = CaptureError(f"{refusal}; {advice}")
        raise last_refusal from refusal


_MAX_PASSES: Final = 2
"""Number of further passes in which what forward reads must be as the pass before left it."""


def _settle(
    front: StepFront, captured: Capture, batch: Sequence[Any], passes: Passes
) -> tuple[list[Capture], tuple[str, ...], bool]:
    """Return (captures that passes need, reasons for the first, whether a pass needs none).

    One pass has been executed since `captured`, the capture for a batch.
    """
    further: list[Capture] = []
    reasons: tuple[str, ...] = ()
    last = captured
    for index in range(_MAX_PASSES):
        if index:
            passes.execute()
        try:
            current = front.find(batch)[0]
        except Changed as change:
            reasons = reasons or change.reasons
            last = front.capture(batch)
            further.append(last)
        else:
            if current is last:
                return further, reasons, True
            last = current
    return further, reasons, False


# -- refusals --------------------------------------------------------------------------------------

_OTHER_LOSS: Final = (
    "forward has another loss when it runs again from the same parameters, buffers, modules and "
    "random state, and what it reads would be frozen: make it an input or a buffer"
)
_CHANGED: Final = re.compile(r"(.*) was (.*?) and is (.*?)(?:, read( at .*))?")


def _describe_change(reasons: Sequence[str]) -> str:
    """Return a text for a change by forward: the first reason why a capture is not valid."""
    reason = "".join(reasons[:1])
    if (match := _CHANGED.fullmatch(reason)) is not None:
        name, old, new, where = match.groups()
        return f"forward changes {name} from {old} to {new}{where or ''}"
    return "forward changes what it reads" + (f" ({reason})" if reason else "")


def _settling_message(name: str, reasons: Sequence[str]) -> str:
    """Return the message for state that each forward pass changes."""
    return (
        f"{name}: {_describe_change(reasons)}, and one graph cannot follow; make it a buffer or an "
        "input, or leave the change out"
    )


def _refuse_fresh(front: StepFront, captured: Capture, tensors: Sequence[torch.Tensor]) -> None:
    """Raise `CaptureError` if a tensor of a later call is another object than at the capture."""
    for node in captured.fresh_inputs(tensors):
        line = find_line(node)
        raise CaptureError(
            f"{front.name}: forward reads{at_line(line)} a tensor of an earlier pass, or a number "
            "that Python computes anew in each step; a compiled step would repeat it: make it an "
            "input or a buffer"
        )


def _refuse_other_results(
    front: StepFront, captured: Capture, batch: Sequence[Any], passes: Passes
) -> NoReturn:
    """Raise `CaptureError`, with the line if known: a second pass has other results."""
    if not captured.is_guarded:
        front.needs_guards = True
        passes.restore()
        captured = front.capture(batch)
        passes.execute()
    try:
        _refuse_fresh(front, captured, front.find(batch)[1])
    except Changed as change:
        raise CaptureError(_settling_message(front.name, change.reasons)) from None
    raise CaptureError(
        f"{front.name}: {_OTHER_LOSS}; if forward makes modules, call the model once before"
    )


_RANDOM: Final = re.compile("[Rr]andom|Generator")


def refuse_draw(front: StepFront, batch: Sequence[Any], passes: Passes) -> NoReturn:
    """Raise `CaptureError` for a draw of the last pass, with the line where Dynamo meets one."""
    generator, line = passes.drawn, ""
    with passes.generator_states.restore_at_end():
        passes.restore()
        passes.execute(lambda: front.record_readings(copy_inputs(batch)), may_draw=True)
        passes.restore()
        try:
            captured = front.capture(batch)
            fresh = captured.fresh_inputs(front.find(batch)[1])
            line = next(filter(None, map(find_line, fresh)), "")
        except Refusal as refusal:
            line = refusal.line if _RANDOM.search(refusal.reason) else ""
        except (CaptureError, Changed):
            pass
    raise CaptureError(draw_message(front.name, generator, line))


# -- snapshots -------------------------------------------------------------------------------------


def _refuse_stale(
    front: StepFront,
    batch: Sequence[Any],
    passes: Passes,
    captures: Sequence[Capture],
    reasons: Sequence[str],
) -> None:
    """Raise `CaptureError` unless the first of `captures` computes what passes now compute."""
    first, last = captures[0], captures[-1]
    tensors = front.find(batch)[1]
    _refuse_fresh(front, last, tensors)
    if last is first or is_same_graph(first, last):
        return
    executions: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    involved = [*{id(tensor): tensor for tensor in (*first.tensors, *tensors)}.values()]
    for capture, inputs in ((first, first.tensors), (last, tensors)):
        passes.execute(partial(_execute_into, executions, capture, inputs, involved))
    (first_results, stored), (last_results, _) = executions
    if not _are_equal(first_results, last_results):
        raise CaptureError(
            f"{front.name}: the first pass has another loss, gradient or buffer than later ones, "
            f"because {_describe_change(reasons)}; call the model once before"
        )
    _refuse_kept(front, batch, first, stored, tensors)


def _execute_into(
    executions: list[tuple[list[torch.Tensor], list[torch.Tensor]]],
    capture: Capture,
    inputs: Sequence[torch.Tensor],
    involved: Sequence[torch.Tensor],
) -> None:
    """Execute a graph; append ((loss, new values and gradients of tensors), stored tensors)."""
    outputs = capture.graph_module(*inputs)
    loss = outputs[capture.result_positions[0]]
    results = [loss.detach(), *(tensor.detach().clone() for tensor in involved)]
    if loss.requires_grad:
        trained = [tensor for tensor in involved if tensor.requires_grad]
        results += torch.autograd.grad(loss.sum(), trained, materialize_grads=True)
    stored = [outputs[position].detach() for position in capture.stored_positions]
    executions.append((results, stored))


def _refuse_kept(
    front: StepFront,
    batch: Sequence[Any],
    first: Capture,
    stored: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Raise `CaptureError` if later passes, on `tensors`, read what the first made of its inputs.

    `stored` are the values that the first pass stores. Parameters count as inputs, buffers do not.
    """
    known, batch_ids = set(map(id, first.tensors)), set(map(id, tensors_in(batch)))
    kept = [tensor for tensor in tensors if id(tensor) not in known]
    graph = first.graph_module.graph
    sources = {
        node
        for node, tensor in zip(graph.find_nodes(op="placeholder"), first.tensors, strict=True)
        if id(tensor) in batch_ids or tensor.requires_grad
    }
    returned = graph.output_node().args[0]
    for position, value in zip(first.stored_positions, stored, strict=True):
        node = returned[position]
        is_kept = any(t.shape == value.shape and _are_equal([t], [value]) for t in kept)
        if is_kept and not sources.isdisjoint(ancestors(graph, node, only_values=True)):
            line = find_line(node)
            where = f", made at {line}," if line else ""
            raise CaptureError(
                f"{front.name}: later passes read a tensor{where} that the first pass makes of "
                "inputs or parameters, and one graph would make it anew in each step; make it a "
                "buffer, or call the model once before"
            )


def _are_equal(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether the results of two passes are equal, except for the order of sums."""
    if len(results) != len(others) or any(
        a.shape != b.shape for a, b in zip(results, others, strict=True)
    ):
        return False
    if any(a.is_meta for a in results):
        return True
    if torch.get_num_threads() == 1:
        return all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(results, others, strict=True)
        )
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True)
        for a, b in zip(results, others, strict=True)
    )
