"""Exports of recurrent networks in less and less RAM, by time steps and as they are captured.

RAM is a share of what the captured step takes where everything is kept, in both.
"""

from __future__ import annotations

import tempfile
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from harness import Cell, Study, record
from poetmodel.bench.measurement import FAILED
from poetmodel.device.io import load_device
from poetmodel.errors import PoetModelError
from poetmodel.export.deployment import STACK_BYTES, alignment_on, reserved_bytes
from poetmodel.export.exporting import export_step
from poetmodel.export.unrolled import unrolled
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.solver.fitting import aligned_graph
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.bench.measurement import Record
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


@cache
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


def named(network: str, share: int, *, apart: bool) -> str:
    """Return what a run is called in the records."""
    return f"{network} | {share} % | {'by time steps' if apart else 'as captured'}"


def runs(
    networks: tuple[str, ...] = tuple(NETWORKS), shares: tuple[int, ...] = SHARES
) -> Iterator[Cell]:
    """Yield each network in each RAM, as captured and with its time steps apart."""
    for network, share, apart in product(networks, shares, (False, True)):
        cell: dict[str, Any] = {"network": network, "share": share, "apart": apart}
        yield Cell(named(**cell), cell)


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Return the record of what an export finds within some RAM."""
    begun, network = time.perf_counter(), fields["network"]
    step = step_of(network, apart=fields["apart"])
    ram_bytes = takes(step_of(network, apart=False))[0] * fields["share"] // 100
    keep_all_bytes, least_bytes = takes(step)
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "device": DEVICE,
        "limit_s": LIMIT_S,
        "ram_bytes": ram_bytes,
        "keep_all_bytes": keep_all_bytes,
        "least_bytes": least_bytes,
        "nodes": len(step.graph.nodes),
        "instructions": sum(node.instructions or 0 for node in step.graph.nodes),
    }
    options: dict[str, Any] = {"ram": ram_bytes, "device": DEVICE, "time_limit": LIMIT_S}
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = export_step(step, Path(folder) / "made", **options).result
    except PoetModelError as error:
        facts |= dict.fromkeys(("gap", "energy_j", "baseline_j"))
        facts |= {"status": FAILED, "reason": str(error)}
    else:
        assert result is not None, "it was solved"
        facts |= {"status": str(result.status), "gap": result.gap, "energy_j": result.energy_j}
        facts["baseline_j"] = result.baseline_energy_j
    seconds = time.perf_counter() - begun
    return record(KIND, named(**fields), cell=fields, seconds=seconds, **facts)


STUDY: Final = Study(
    name="recurrent",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: list(runs(("GRU, one sample",), (100,)))[:1],
    measure=measure,
    alone=False,
)
