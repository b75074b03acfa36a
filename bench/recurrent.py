"""Exports of recurrent networks in less and less RAM, by time steps and as they are captured.

``python bench/recurrent.py --out bench/results/$(date +%F)-recurrent.jsonl`` solves each for a
minute at most; ``python scripts/make_results.py`` puts the figures into ``docs/guides/export.md``.
RAM is a share of what the captured step takes where everything is kept, in both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from harness import latest, parsed, record
from poetmodel.device.io import load_device
from poetmodel.errors import PoetModelError
from poetmodel.export.deployment import STACK_BYTES, alignment_on, reserved_bytes
from poetmodel.export.exporting import export_step
from poetmodel.export.unrolled import unrolled
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.solver.fitting import aligned_graph
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.export.step import LoweredStep

KIND: Final = "recurrent"
"""Kind of the records."""
NETWORKS: Final = {
    "GRU": (nn.GRU, 1, 20, 4),
    "LSTM, two layers": (nn.LSTM, 2, 8, 8),
    "RNN": (nn.RNN, 1, 32, 8),
    "GRU, one sample": (nn.GRU, 1, 24, 1),
}
"""Cell, layers, time steps and batch; of 8 inputs and 16 hidden, with a linear layer at the end."""
SHARES: Final = (100, 80, 70, 60, 50)
"""RAM [% of keep-all]."""
DEVICE: Final = "nrf52840"
"""Whose storage and costs count."""
LIMIT_S: Final = 60.0
"""Wall time of a solve [s]."""


class Recurrent(nn.Module):  # type: ignore[misc, unused-ignore]
    """A recurrent network that classifies sequences."""

    def __init__(self, cell: Any, layers: int) -> None:
        super().__init__()
        self.cell = cell(8, 16, layers, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.head(self.cell(x)[0][:, -1])
        return found


def step_of(network: str, *, apart: bool) -> LoweredStep:
    """Return the step of a network with plain SGD, as captured or with its time steps apart."""
    torch.manual_seed(0)
    cell, layers, steps, batch = NETWORKS[network]
    model = Recurrent(cell, layers)
    inputs = (torch.randn(batch, steps, 8), torch.randint(0, 4, (batch,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = lower(
        model, functional.cross_entropy, inputs, name=network, optimizer=optimizer, masks=False
    )
    return unrolled(step) if apart else step


def takes(step: LoweredStep) -> tuple[int, int]:
    """Return the RAM of a step where everything is kept, and the least that any node leaves [B]."""
    graph = aligned_graph(step.graph, alignment_on(load_device(DEVICE)))
    reserved = reserved_bytes(step, STACK_BYTES)
    return checkpoint_all_peak_bytes(graph) + reserved, floor(graph).bytes + reserved


def measured(step: LoweredStep, ram_bytes: int, limit_s: float) -> dict[str, Any]:
    """Return what an export finds within some RAM."""
    keep_all_bytes, least_bytes = takes(step)
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "device": DEVICE,
        "limit_s": limit_s,
        "ram_bytes": ram_bytes,
        "keep_all_bytes": keep_all_bytes,
        "least_bytes": least_bytes,
        "nodes": len(step.graph.nodes),
        "instructions": sum(node.instructions or 0 for node in step.graph.nodes),
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = export_step(
                step, Path(folder) / "made", ram=ram_bytes, device=DEVICE, time_limit=limit_s
            )
    except PoetModelError as error:
        nothing = dict.fromkeys(("gap", "energy_j", "baseline_j"))
        return {**facts, **nothing, "status": "failed", "reason": str(error)}
    result = made.result
    if result is None:
        raise TypeError(made)
    solved = {"status": str(result.status), "gap": result.gap, "energy_j": result.energy_j}
    return {**facts, **solved, "baseline_j": result.baseline_energy_j}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", action="append", choices=NETWORKS, help="default: all")
    parser.add_argument("--share", action="append", type=int, help="of keep-all [%%]")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="of a solve [s]")
    options = parsed(parser, "recurrent.jsonl", arguments)
    store = latest(options.out)
    for network in options.network or NETWORKS:
        steps = {apart: step_of(network, apart=apart) for apart in (False, True)}
        whole_bytes, _ = takes(steps[False])
        for share, apart in product(options.share or SHARES, steps):
            begun = time.perf_counter()
            facts = measured(steps[apart], whole_bytes * share // 100, options.limit)
            cell = {"network": network, "share": share, "apart": apart}
            name = f"{network} | {share} % | {'by time steps' if apart else 'as captured'}"
            seconds = time.perf_counter() - begun
            store.add(record(KIND, name, cell=cell, seconds=seconds, **facts))
            sys.stderr.write(f"{name}: {facts['status']}, {seconds:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
