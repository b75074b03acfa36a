"""What is measured: a frozen registry of cases, and small ones for a smoke run.

A case is one problem that is solved by default. `CASES` leaves out budgets below a graph's floor,
which no schedule can keep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from poetmodel.device import Costs, Device
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph

LIMIT_S: Final = 60.0
"""Wall time of a case, building included, unless it says otherwise [s]."""
PAPER_LIMIT_S: Final = 120.0
"""The same for the formulation ``paper``, in the grid's comparison [s]."""
SMOKE_LIMIT_S: Final = 5.0
"""The same for every case of a smoke run [s]."""
GAP: Final = 1e-4
"""Gap of the overhead at which a solve is done."""
THREADS: Final = 1
"""Threads that a solver may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, solved by default."""

    group: str
    """Table that it belongs to: ``main``, ``reference`` or ``zoo``."""
    model: str
    """A shipped model."""
    device: str
    """A shipped device."""
    ram: str
    """RAM budget, as a share of the keep-all peak."""
    deadline_counts: str | None = None
    """Which time counts; None takes the device's default. There is no deadline."""
    limit_s: float = LIMIT_S
    """Wall time, building included [s]."""
    seed: int = 0
    """Seed of the solver."""
    expected_overhead_ratio: float | None = None
    """The overhead that is known to be the least, as a fraction of the baseline."""

    @property
    def name(self) -> str:
        """What identifies it in a run."""
        parts = (self.group, self.model, self.device, self.ram, "default", f"s{self.seed}")
        return " | ".join(parts)

    def problem(self) -> Problem:
        """Return what is to be solved."""
        graph = graph_of(self.model)
        costs = Costs.estimate(graph, Device.load(self.device))
        return Problem(graph, costs, ram=self.ram, deadline_counts=self.deadline_counts)


@cache
def graph_of(model: str) -> Graph:
    """Return a shipped graph, read once."""
    return load_model(model)


@cache
def _floor_ratio(model: str) -> float:
    graph = graph_of(model)
    return floor(graph).bytes / checkpoint_all_peak_bytes(graph)


def possible(case: Case) -> bool:
    """Return whether the budget of a case is at least the minimum RAM of its graph."""
    return float(case.ram.rstrip("%")) / 100 >= _floor_ratio(case.model)


def _reference_cases() -> Iterator[Case]:
    """Yield problems whose least overhead is known."""
    known = (
        ("paper/vgg16-cifar", "paper-m4", "50%", 0.20337e-2),
        ("paper/vgg16-cifar", "paper-a72", "50%", 0.01765e-2),
        ("paper/resnet18-cifar", "paper-a72", "30%", 0.17027e-2),
        ("paper/resnet18-cifar", "paper-m4", "40%", 0.16307e-2),
        ("paper/bert", "paper-a72", "40%", 0.14904e-2),
    )
    for model, device, ram, overhead_ratio in known:
        yield Case(
            group="reference",
            model=model,
            device=device,
            ram=ram,
            deadline_counts="compute",
            expected_overhead_ratio=overhead_ratio,
        )


def _zoo_cases() -> Iterator[Case]:
    """Yield the zoo's graphs on a Raspberry Pi, ResNet-18/CIFAR first."""
    main = Case(group="main", model="resnet18-cifar", device="rpi4b", ram="40%")
    yield main
    models = (
        "vgg16-cifar",
        "resnet18-cifar",
        "vgg16",
        "resnet18",
        "resnet50",
        "mobilenetv2",
        "bert-base",
        "transformer",
    )
    for model in models:
        for ram in ("50%", "70%"):
            yield replace(main, group="zoo", model=model, ram=ram)


CASES: Final = tuple(case for case in (*_zoo_cases(), *_reference_cases()) if possible(case))
"""Every case of a recorded run, in order."""


def smoke_cases() -> tuple[Case, ...]:
    """Return a case of each group at its smallest size."""
    main = Case(group="main", model="mlp", device="mkr1000", ram="70%", limit_s=SMOKE_LIMIT_S)
    known = Case(
        group="reference",
        model="paper/linear",
        device="paper-m4",
        ram="50%",
        deadline_counts="compute",
        limit_s=SMOKE_LIMIT_S,
    )
    return main, replace(main, group="zoo"), known
