"""Measuring one cell: heap peak, step time beside eager's, bytes written, equality with eager."""

from __future__ import annotations

import copy
import gc
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.peaks import heap_peak_bytes
from pytorch.networks import NETWORKS
from pytorch.ours import NoPlanError, compiled
from pytorch.peers import (
    Method,
    checkpoint_per_block,
    eager,
    hooks_to_file,
    memory_budget,
    selective_checkpoint,
)
from resuming import FAILED

if TYPE_CHECKING:
    from pytorch.cells import Cell
    from pytorch.networks import Training

RAN: Final = "ran"
"""Status of a method that solves nothing."""


def measure(cell: Cell, *, folder: str, ram_bytes: int | None = None) -> dict[str, Any]:
    """Run one method on one network; return what a record says of it.

    Parameters
    ----------
    cell : Cell
        What to run.
    folder : str
        Where pages lie.
    ram_bytes : int, optional
        The budget, for compiled steps at the peak of a peer [B].

    Returns
    -------
    dict
        ``seconds`` and ``processor_s`` of everything, ``status``, and plain facts. Whatever stops a
        method is its result: ``status`` is `FAILED` then, and ``reason`` says why.
    """
    torch.set_num_threads(1)
    begun = time.perf_counter()
    facts: dict[str, Any] = {
        "cell": cell.to_dict(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    try:
        facts |= _measured(cell, folder, ram_bytes)
    except NoPlanError as error:
        facts |= error.facts
    except Exception as error:  # noqa: BLE001 - whatever stops a method is what is to be told
        facts |= {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    return facts | {
        "seconds": time.perf_counter() - begun,
        "processor_s": time.process_time(),
    }


def _measured(cell: Cell, folder: str, ram_bytes: int | None) -> dict[str, Any]:
    """Measure.

    Notes
    -----
    Results are those of the second step after the same first one, so that buffers have a history.
    The peak is measured with gradients that are there already, and that compiled steps add to at
    once, as the other methods do.
    """
    torch.manual_seed(cell.seed)
    training = NETWORKS[cell.network]()
    model, loss_fn, inputs = training
    twin = copy.deepcopy(model)
    reference = eager((twin, loss_fn, inputs))
    method = _method(cell, training, folder, ram_bytes)
    torch.manual_seed(cell.seed + 1)
    expected = _results(twin, reference, inputs)
    torch.manual_seed(cell.seed + 1)
    begun = time.perf_counter()
    found = _results(model, method, inputs)
    two_steps_s = time.perf_counter() - begun
    unequal = [key for key in expected if not torch.equal(expected[key], found[key])]
    del expected, found
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    before = method.written_bytes()
    peak = heap_peak_bytes(lambda: method.run(*inputs))
    written = method.written_bytes() - before
    eager_peak = heap_peak_bytes(lambda: reference.run(*inputs))
    return {
        "status": RAN,
        "reason": "",
        "heap_peak_bytes": peak,
        "eager_heap_peak_bytes": eager_peak,
        "written_bytes": written,
        "two_steps_s": two_steps_s,
        "pairs": _pairs(method, reference, inputs, cell.pairs),
        "unequal_gradients": sum(key.startswith("gradient") for key in unequal),
        "unequal_buffers": sum(key.startswith("buffer") for key in unequal),
        "equal": not unequal,
        **method.details,
    }


def _method(cell: Cell, training: Training, folder: str, ram_bytes: int | None) -> Method:
    if cell.own is not None:
        return compiled(training, cell, folder=folder, ram_bytes=ram_bytes)
    if cell.method == "file-hooks":
        return hooks_to_file(training, folder)
    if cell.method == "memory-budget":
        return memory_budget(training, cell.share or 1.0)
    plain = {
        "eager": eager,
        "checkpoint": checkpoint_per_block,
        "selective": selective_checkpoint,
    }
    return plain[cell.method](training)


def _results(model: torch.nn.Module, method: Method, inputs: Any) -> dict[str, torch.Tensor]:
    """Run two steps; return copies of what the second one leaves."""
    method.run(*inputs)
    model.zero_grad()
    found = {"loss": method.run(*inputs)}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def _pairs(method: Method, reference: Method, inputs: Any, count: int) -> list[list[float]]:
    """Time steps, each beside one of eager, which comes first and second in turn.

    Returns
    -------
    list of list of float
        Time by the clock, time of the processor, and both of eager's step [s].
    """
    pairs = []
    for place in range(count):
        gc.collect()
        first, second = (method, reference) if place % 2 else (reference, method)
        times = {id(each): _times_s(each, inputs) for each in (first, second)}
        pairs.append([round(t, 6) for t in (*times[id(method)], *times[id(reference)])])
    return pairs


def _times_s(method: Method, inputs: Any) -> tuple[float, float]:
    begin, processor = time.perf_counter(), time.process_time()
    method.run(*inputs)
    return time.perf_counter() - begin, time.process_time() - processor
