"""Which layers of small networks to train in how much RAM: the best set, greedy, the last layers.

Batch norms keep their statistics. Scores are norms of the gradient of a batch of noise, for which
batch norms took the statistics of the batch. Nothing is paged: all state that is trained stays in
RAM.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import torch

import poetmodel as pm
from harness import RecordedRun, Study, record
from mcu.networks import mcunet, mlp, mobilenetv2
from poetmodel import torch as pmt
from poetmodel.export.choosing import layers_of
from poetmodel.export.freezing import Freezable
from poetmodel.export.relaxation import costs_for
from poetmodel.problem.infeasibility import obstacle
from poetmodel.torch.choosing import gradient_norms
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mcu.networks import Training
    from poetmodel.bench.measurement import Record

KIND: Final = "choice"
"""Kind of the records."""
NETWORKS: Final[dict[str, Callable[..., Training]]] = {
    "MobileNetV2 0.35, 48 x 48": mobilenetv2,
    "MCUNet-like, 64 x 64": mcunet,
    "MLP": mlp,
}
"""Networks by name; the last one is for smoke runs."""
BUDGETS: Final = ("160KiB", "192KiB", "256KiB", "320KiB", "384KiB", "512KiB")
CHECK_S: Final = 1.0
"""Time for the question whether a set has a schedule, for both rules [s]."""
IMAGES: Final = 8
"""Size of the batch whose gradient counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRun(RecordedRun):
    """One network within one budget."""

    network: str
    ram: str
    device: str = "nrf52840"
    limit_s: float = 60.0
    seed: int = 0

    @property
    def name(self) -> str:
        """Its name in the records."""
        return f"{self.network} | {self.ram}"


class Sets:
    """The sets of layers of a network, and whether one has a schedule within a budget."""

    def __init__(self, run: ChoiceRun) -> None:
        torch.manual_seed(run.seed)
        torch.set_num_threads(1)
        self.model, self.loss_fn, self.inputs = NETWORKS[run.network]()
        _, _, batch = NETWORKS[run.network](IMAGES)
        names = [name for name, _ in self.model.named_parameters()]
        self.layers = layers_of(names, "layer")
        self.scores = gradient_norms(self.layers, self.model, self.loss_fn, batch)
        self.model.eval()
        optimizer = torch.optim.SGD(self.model.parameters())
        options = {"name": run.network, "optimizer": optimizer, "masks": False}
        step = lower(self.model, self.loss_fn, self.inputs, **options)
        self.freezable = Freezable(step=step)
        costs = pm.Costs.estimate(step.graph, pm.Device.load(run.device))
        self.problem = pm.Problem(step.graph, costs, ram=run.ram, paging=False).resolved()

    def score(self, chosen: Sequence[str]) -> float:
        """Return the sum of the scores of some layers."""
        return sum(self.scores[layer] for layer in chosen)

    def trains(self, chosen: Sequence[str]) -> bool:
        """Return whether a schedule was found for the step that trains some layers."""
        if not chosen:
            return True
        names = [name for layer in chosen for name in self.layers[layer]]
        graph = self.freezable.trained(names)
        problem = replace(self.problem, graph=graph, costs=costs_for(graph, self.problem))
        if obstacle(problem) is not None:
            return False
        return pm.solve(problem, gap=1.0, time_limit=CHECK_S).schedule is not None

    def last(self) -> list[str]:
        """Return the most layers from the end that train together."""
        order, low = list(self.layers)[::-1], 0
        high = len(order) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.trains(order[:middle]) else (low, middle)
        return order[:low]

    def greedy(self) -> list[str]:
        """Return layers by score for their state, each that still trains with the others."""
        graph, tensors = self.freezable.graph, self.freezable.parameters
        sizes = {
            layer: sum(graph.tensor_bytes[graph.tensor_index[x]] for n in names for x in tensors[n])
            for layer, names in self.layers.items()
        }
        chosen: list[str] = []
        for layer in sorted(sizes, key=lambda layer: -self.scores[layer] / sizes[layer]):
            if self.trains([*chosen, layer]):
                chosen.append(layer)
        return chosen


def measure(fields: dict[str, Any], _start: None = None) -> Record:
    """Return the record of the best set, and of those of both rules."""
    run = ChoiceRun(**fields)
    sets = Sets(run)
    rules: dict[str, Any] = {}
    for name, rule in (("last", sets.last), ("greedy", sets.greedy)):
        begun = time.perf_counter()
        chosen = rule()
        facts = {"layers": len(chosen), "score": sets.score(chosen)}
        rules[name] = {**facts, "seconds": time.perf_counter() - begun}
    begun = time.perf_counter()
    choice = pmt.choose(
        sets.model, sets.loss_fn, sets.inputs, scores=sets.scores, device=run.device,
        name=run.network, time_limit=run.limit_s, ram=run.ram, paging=False,
    )  # fmt: skip
    result = choice.result
    overhead_j = result.overhead_j
    ratio = None if overhead_j is None else overhead_j / result.baseline_energy_j
    copied = {name: getattr(choice, name) for name in ("score", "bound", "gap", "note")}
    return record(
        KIND,
        run.name,
        cell=fields,
        seconds=time.perf_counter() - begun,
        status=str(choice.status),
        **copied,
        total=sum(sets.scores.values()),
        layers=len(choice.layers),
        of_layers=len(sets.layers),
        chosen=list(choice.layers),
        ram_budget_bytes=sets.problem.ram_budget_bytes,
        peak_ram_bytes=result.peak_ram_bytes,
        overhead_ratio=ratio,
        statistics=dict(choice.selection.statistics),
        rules=rules,
        versions={"torch": torch.__version__, **result.versions},
    )


def runs(
    networks: tuple[str, ...] = tuple(NETWORKS)[:2], budgets: tuple[str, ...] = BUDGETS
) -> Iterator[ChoiceRun]:
    """Yield each network within each budget."""
    for network, ram in product(networks, budgets):
        yield ChoiceRun(network=network, ram=ram)


STUDY: Final = Study(
    name="choice",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: [ChoiceRun(network="MLP", ram="3MiB", limit_s=3.0)],
    measure=measure,
    alone=False,
)
