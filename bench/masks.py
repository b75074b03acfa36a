"""RAM of exported steps that train all, biases or the last two layers, with masks and without.

Without masks a step saves for its backward pass what PyTorch saves.
"""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

import poetmodel as pm
from harness import Cell, Study, record
from mcu.networks import NETWORKS
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.torch.lowering.step import lower
from what_trains_where import MLPERF_TINY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.bench.measurement import Record
    from poetmodel.export.step import LoweredStep

KIND: Final = "masks"
"""Kind of the records."""
ALL, BIASES, LAST = TRAINED = ("all", "biases", "last-2")
"""What is trained, as ``--train`` has it of built-in networks."""
DEVICE: Final = "nrf52840"
"""Whose storage and costs count."""
NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d)
LIMIT_S: Final = 30.0
"""Wall time of a solve [s]."""


def train(model: nn.Module, trained: str) -> list[nn.Parameter]:
    """Freeze what is not trained, and return what is.

    A norm belongs to the layer before it. One whose weight is frozen takes its running statistics.
    """
    owners = [m for m in model.modules() if [*m.parameters(recurse=False)]]
    layers = [k for k, m in enumerate(owners) if not isinstance(m, NORMS)]
    first = layers[-2] if trained == LAST else 0
    for k, module in enumerate(owners):
        for name, parameter in module.named_parameters(recurse=False):
            wanted = k >= first and (trained != BIASES or name == "bias")
            parameter.requires_grad_(requires_grad=wanted)
        if isinstance(module, NORMS):
            module.train(module.weight.requires_grad)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def step_of(network: str, trained: str, *, masks: bool) -> tuple[LoweredStep, int]:
    """Return the step of a network with plain SGD, and how many numbers it trains."""
    torch.manual_seed(0)
    model, loss_fn, inputs = NETWORKS[network]()
    parameters = train(model, trained)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    step = lower(model, loss_fn, inputs, name=network, optimizer=optimizer, masks=masks)
    return step, sum(parameter.numel() for parameter in parameters)


def least(step: LoweredStep, *, paging: bool) -> dict[str, Any]:
    """Return the least RAM of a schedule, and the least that is not ruled out [B]."""
    costs = pm.Costs.estimate(step.graph, pm.Device.load(DEVICE))
    problem = pm.Problem(step.graph, costs, ram="100%", minimize="ram", paging=paging)
    result = pm.solve(problem, time_limit=LIMIT_S, gap=1e-4)
    return {
        "status": str(result.status),
        "bytes": None if result.simulation is None else result.simulation.peak_ram_bytes,
        "bound_bytes": result.objective_bound,
    }


def named(network: str, trained: str, *, masks: bool) -> str:
    """Return what a run is called in the records."""
    return f"{network} | {trained} | {'masks' if masks else 'as PyTorch'}"


def runs(networks: tuple[str, ...] = MLPERF_TINY) -> Iterator[Cell]:
    """Yield each network without masks, then with them."""
    for network, trained, masks in product(networks, TRAINED, (False, True)):
        cell: dict[str, Any] = {"network": network, "trained": trained, "masks": masks}
        yield Cell(named(**cell), cell)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Return the record of a step: its RAM however it is scheduled, and its instructions."""
    begun = time.perf_counter()
    step, numbers = step_of(**fields)
    facts = {
        "torch": str(torch.__version__),
        "device": DEVICE,
        "limit_s": LIMIT_S,
        "trained": numbers,
        "state_bytes": step.graph.state_bytes,
        "instructions": sum(node.instructions or 0 for node in step.graph.nodes),
        "keep_all_bytes": checkpoint_all_peak_bytes(step.graph),
        "floor_bytes": floor(step.graph).bytes,
        "recomputing": least(step, paging=False),
        "paging": least(step, paging=True),
    }
    seconds = time.perf_counter() - begun
    return record(KIND, named(**fields), cell=fields, seconds=seconds, **facts)


STUDY: Final = Study(
    name="masks",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: runs(("mlp",)),
    measure=measure,
    alone=False,
)
