"""RAM of exported steps that train all, biases or the last two layers, with masks and without.

``python bench/masks.py --out bench/results/$(date +%F)-masks.jsonl`` solves each for some seconds;
``python scripts/make_results.py`` puts the figures into ``docs/guides/model.md``. Without
masks a step saves for its backward pass what PyTorch saves.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

import poetmodel as pm
from harness import latest, parsed, record
from mcu.networks import NETWORKS
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.torch.lowering.step import lower
from what_trains_where import MLPERF_TINY

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def least(step: LoweredStep, *, paging: bool, limit_s: float) -> dict[str, Any]:
    """Return the least RAM of a schedule, and the least that is not ruled out [B]."""
    costs = pm.Costs.estimate(step.graph, pm.Device.load(DEVICE))
    problem = pm.Problem(step.graph, costs, ram="100%", minimize="ram", paging=paging)
    result = pm.solve(problem, time_limit=limit_s, gap=1e-4)
    return {
        "status": str(result.status),
        "bytes": None if result.simulation is None else result.simulation.peak_ram_bytes,
        "bound_bytes": result.objective_bound,
    }


def measured(network: str, trained: str, *, masks: bool, limit_s: float) -> dict[str, Any]:
    """Return what a step takes of RAM however it is scheduled, and its instructions."""
    step, numbers = step_of(network, trained, masks=masks)
    return {
        "torch": str(torch.__version__),
        "device": DEVICE,
        "limit_s": limit_s,
        "trained": numbers,
        "state_bytes": step.graph.state_bytes,
        "instructions": sum(node.instructions or 0 for node in step.graph.nodes),
        "keep_all_bytes": checkpoint_all_peak_bytes(step.graph),
        "floor_bytes": floor(step.graph).bytes,
        "recomputing": least(step, paging=False, limit_s=limit_s),
        "paging": least(step, paging=True, limit_s=limit_s),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", action="append", choices=NETWORKS, help="default: MLPerf Tiny")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="of a solve [s]")
    options = parsed(parser, "masks.jsonl", arguments)
    store = latest(options.out)
    for network, trained in product(options.network or MLPERF_TINY, TRAINED):
        for masks in (False, True):
            begun = time.perf_counter()
            facts = measured(network, trained, masks=masks, limit_s=options.limit)
            cell = {"network": network, "trained": trained, "masks": masks}
            name = f"{network} | {trained} | {'masks' if masks else 'as PyTorch'}"
            seconds = time.perf_counter() - begun
            store.add(record(KIND, name, cell=cell, seconds=seconds, **facts))
            sys.stderr.write(f"{name}: {seconds:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
