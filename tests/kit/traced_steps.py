"""Running a traced step by its units alone, and the same step as PyTorch runs it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from poetmodel.torch import Trace
    from poetmodel.torch.step.units import Emission, Reading, Unit


def run_units(trace: Trace) -> dict[str, torch.Tensor]:
    """Run a step from what `Trace.parts` says and nothing else; return its results by name.

    Storages are let go after the last unit or result that reads them, so that a reading which
    leaves one out fails.
    """
    import torch

    parts = trace.parts
    run = Run(trace)
    with torch.no_grad():
        for unit in parts.units:
            run.compute(unit)
            for emission in parts.emissions:
                if emission.after == unit.index:
                    run.emit(emission)
            run.free_after(unit.index)
        for emission in parts.emissions:
            if emission.after is None:
                run.emit(emission)
    assert not run.storages
    return run.results


class Run:
    """The state of a step that is run unit by unit."""

    def __init__(self, trace: Trace) -> None:
        self.parts = trace.parts
        self.arguments = {a.node: _plain(trace.joint.value(a)) for a in trace.joint.arguments}
        self.storages: dict[int, tuple[torch.Tensor, ...]] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.last = _last_readers(trace)

    def compute(self, unit: Unit) -> None:
        """Compute a unit and keep what it makes."""
        made = _call(unit.node, self._values(unit.reads))
        for index in unit.storages:
            positions = [layout.position for layout in self.parts.storages[index].layouts]
            self.storages[index] = tuple(made if p is None else made[p] for p in positions)

    def emit(self, emission: Emission) -> None:
        """Keep a copy of a result."""
        value = self._values(emission.reads)[emission.result.node]
        self.results[emission.result.name] = value.clone()

    def free_after(self, unit: int) -> None:
        """Let go what no later unit and no later result reads."""
        for index, last in self.last.items():
            if last == unit:
                del self.storages[index]

    def _values(self, reads: Reading) -> dict[Any, Any]:
        """Return the value of every node that a reading makes available."""
        there: dict[Any, Any] = dict(self.arguments)
        for node, (index, place) in self.parts.direct.items():
            if index in reads.storages:
                there[node] = self.storages[index][place]
        for view in reads.views:
            there[view] = _call(view, there)
        return there


def _call(node: Any, values: dict[Any, Any]) -> Any:
    from torch.fx.node import map_arg

    from poetmodel.torch.capturing.replay import call

    get = values.__getitem__
    return call(node, map_arg(node.args, get), map_arg(node.kwargs, get))


def _plain(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _last_readers(trace: Trace) -> Mapping[int, int]:
    """Return for each storage the last unit that needs it, its own or that of a result too."""
    last = {storage.index: storage.unit for storage in trace.parts.storages}
    for unit in trace.parts.units:
        for index in unit.reads.storages:
            last[index] = max(last[index], unit.index)
    for emission in trace.parts.emissions:
        for index in emission.reads.storages:
            last[index] = max(last[index], emission.after or 0)
    return last


def run_eager(
    model: torch.nn.Module, loss_fn: Any, inputs: tuple[Any, ...]
) -> dict[str, torch.Tensor]:
    """Run a step of a copy of the model as PyTorch does; name its results as `run_units` does.

    Every buffer is among the results, whether the step changes it or not.
    """
    model, inputs = copy.deepcopy(model), copy.deepcopy(inputs)
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(*inputs) if loss_fn is None else loss_fn(model(*inputs[:-1]), inputs[-1])
    loss.backward()
    results = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        results[f"mutation of {name}"] = buffer
    return results
