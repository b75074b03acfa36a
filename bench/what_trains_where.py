"""Whole steps of built-in graphs: small networks with their state in the graph, on boards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from harness import RecordedRun
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.zoo import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem

POLICIES: Final = "policies"
"""The part of the records of 2026-11-22 that compares methods at equal RAM."""

# -- networks and boards ---------------------------------------------------------------------------

NETWORKS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "ds-cnn": ("ds-cnn", {}),
        "resnet8": ("resnet8", {}),
        "autoencoder": ("autoencoder", {}),
        "mobilenetv1-vww": ("mobilenetv1-vww", {}),
        "mobilenetv2-035, 48 x 48": ("mobilenetv2-035", {}),
        "mobilenetv2-035, 96 x 96": ("mobilenetv2-035", {"image_size": 96}),
        "mlp": ("mlp", {}),
    }
)
"""Networks by the names that tables use: a model of the zoo, and its sizes."""
MLPERF_TINY: Final = ("ds-cnn", "resnet8", "autoencoder", "mobilenetv1-vww")

ACTIVATIONS, STATE, IN_PLACE, TILES = "activations", "state", "in place", "tiles"
GRAPHS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        ACTIVATIONS: {},
        STATE: {"state": "sgd"},
        IN_PLACE: {"state": "sgd", "in_place": True},
        TILES: {"state": "sgd", "in_place": True, "tile": "32KiB"},
    }
)
"""What is in the graph, as options of the zoo."""

PAGED, MAPPED = "nrf52840", "stm32f746"
"""Boards that stand for their kind of storage: an SD card, and flash that the core reads."""
LEAST_RAM: Final = "least"
"""What a budget between the least RAM and keep-all begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun(RecordedRun):
    """One training step, scheduled by one method."""

    part: str
    """Part of a study that it belongs to."""
    network: str
    """One of `NETWORKS`."""
    graph: str
    """What is in the graph, one of `GRAPHS`."""
    device: str
    """A shipped device."""
    ram: str | None = None
    """RAM budget: a share of the keep-all peak, or from `LEAST_RAM` on; None for the device's."""
    minimize: str = "energy"
    """What is minimized."""
    paging: bool = True
    """Whether tensors may be paged; if not, all state is in RAM."""
    method: str = "optimal"
    """A method of `poetmodel.baselines`."""
    gap: float = 0.01
    """Gap at which a solve is done."""
    limit_s: float = 20.0
    """Wall time, building included [s]."""
    seed: int = 0
    """Seed of the solver."""

    @property
    def name(self) -> str:
        """What it is called in the records."""
        ram = self.minimize if self.minimize == "ram" else self.ram or "its RAM"
        paging = "paging" if self.paging else "no paging"
        parts = (self.part, self.network, self.graph, self.device, ram, paging, self.method)
        return " | ".join(parts)

    def problem(self) -> Problem:
        """Return what is to be scheduled."""
        graph, device = graph_of(self.network, self.graph), pm.Device.load(self.device)
        stated = pm.Problem(
            graph,
            pm.Costs.estimate(graph, device),
            ram="100%",
            minimize=self.minimize,
            paging=self.paging,
        )
        if self.ram is None:
            return replace(stated, ram=None)
        begin, plus, share = self.ram.partition("+")
        if begin != LEAST_RAM or not plus:
            return replace(stated, ram=self.ram)
        least, most = stated.floor.bytes, checkpoint_all_peak_bytes(graph)
        return replace(stated, ram=least + (most - least) * int(share.rstrip("%")) // 100)


@cache
def graph_of(network: str, graph: str) -> Graph:
    """Return the graph of a network with some of it in the graph, made once."""
    model, sizes = NETWORKS[network]
    return MODELS[model](**sizes, **GRAPHS[graph])
