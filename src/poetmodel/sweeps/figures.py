"""Figures and tables of the paper (POET, ICML 2022) as sweeps, each an entry of `FIGURES`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.registry import method_names
from poetmodel.errors import InputError
from poetmodel.sweeps.runs import Run, Settings, grid

if TYPE_CHECKING:
    from collections.abc import Mapping


COMPUTE: Final = "compute"
"""Value of `deadline_counts` for the deadlines of the paper, which limit compute time alone (its
equation 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureGrid:
    """A grid of runs of a figure: all combinations of models, devices, limits and methods."""

    models: tuple[str, ...]
    devices: tuple[str, ...]
    ram: tuple[str, ...]
    quick_ram: tuple[str, ...]
    """The budgets of a quick figure; () to omit this grid."""
    methods: tuple[str, ...]
    deadlines: tuple[str | None, ...] = (None,)
    deadline_counts: str | None = None
    """The time that the deadline limits; None for the device's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure or table of the paper."""

    name: str
    """Name in ``poetmodel bench``."""
    title: str
    """Description, in one line."""
    paper: str
    """Result that the paper states."""
    grids: tuple[FigureGrid, ...]
    limit_s: float
    """Time limit of each solve, building included [s]."""
    quick_limit_s: float
    """Time limit of each solve in a quick figure, building included [s]."""

    def runs(self, *, quick: bool = False, time_limit_s: float | None = None) -> tuple[Run, ...]:
        """Return the runs of all grids without duplicates, each grid in the order of `grid`.

        `time_limit_s` replaces the time limits of the figure, unless it is None or 0 [s].
        """
        limit_s = time_limit_s or (self.quick_limit_s if quick else self.limit_s)
        unique_runs: dict[Run, None] = {}
        for figure_grid in self.grids:
            deadline_counts = figure_grid.deadline_counts
            runs = grid(
                figure_grid.models,
                figure_grid.devices,
                ram=figure_grid.quick_ram if quick else figure_grid.ram,
                deadlines=figure_grid.deadlines,
                methods=figure_grid.methods,
                settings=Settings(deadline_counts=deadline_counts, time_limit_s=limit_s),
            )
            unique_runs.update(dict.fromkeys(runs))
        return tuple(unique_runs)


_BUDGETS: Final = tuple(f"{percent}%" for percent in range(20, 100, 10))
_QUICK_BUDGETS: Final = ("30%", "50%", "70%")
_PAPER_DEVICES: Final = ("paper-m0", "paper-m4", "paper-a72", "jetson-tx2")

_FIGURE2 = Figure(
    name="figure2",
    title="Maps of the best schedules of a small linear network: recomputed, kept, paged",
    paper="Of eight layers in a row, 2 and 3 are cheap and are recomputed; 5 and 6 are expensive, "
    "and are paged out after their computation and paged in before their use.",
    grids=tuple(
        FigureGrid(
            models=(model,),
            devices=devices,
            ram=ram,
            quick_ram=quick_ram,
            methods=("optimal",),
            deadline_counts=COMPUTE,
        )
        for model, devices, ram, quick_ram in (
            ("paper/linear", _PAPER_DEVICES, ("46%", "50%", "52%"), ("50%",)),
            ("mlp", ("rpi4b",), ("70%", "80%"), ("70%",)),
        )
    ),
    limit_s=60.0,
    quick_limit_s=10.0,
)

_FIGURE3 = Figure(
    name="figure3",
    title="Energy overhead against RAM: three networks on four devices, every method",
    paper="POET needs the lowest energy in most configurations; on the TX2 up to 35 % less than "
    "DTR for ResNet-18.",
    grids=tuple(
        FigureGrid(
            models=models,
            devices=_PAPER_DEVICES,
            ram=_BUDGETS,
            quick_ram=quick_ram,
            methods=method_names(),
            deadline_counts=COMPUTE,
        )
        for models, quick_ram in (
            (("paper/resnet18-cifar", "paper/vgg16-cifar", "paper/bert"), ("45%", "70%")),
            (("resnet18-cifar",), ("50%",)),
            (("vgg16-cifar",), ("70%",)),
            (("bert-base",), ()),
        )
    ),
    limit_s=10.0,
    quick_limit_s=3.0,
)

_FIGURE4 = Figure(
    name="figure4",
    title="Paging alone, recomputation alone, and both, on VGG-16 under deadlines",
    paper="Both together need up to 40 % less energy than either alone; recomputation alone is "
    "infeasible under the tightest deadline.",
    grids=tuple(
        FigureGrid(
            models=models,
            devices=(device,),
            ram=("45%", "50%", "60%", "70%", "80%", "90%"),
            quick_ram=quick_ram,
            deadlines=deadlines,
            methods=("optimal", "recompute-only", "paging-only"),
            deadline_counts=counts,
        )
        for models, device, quick_ram, deadlines, counts in (
            (
                ("paper/vgg16-cifar", "vgg16-cifar"),
                "paper-a72",
                ("50%", "60%", "70%", "80%"),
                ("100%", "100.02%", "100.1%", None),
                COMPUTE,
            ),
            (
                ("vgg16-cifar",),
                "rpi4b",
                ("60%", "70%", "80%"),
                ("100.1%", "102%", "110%", None),
                None,
            ),
        )
    ),
    limit_s=60.0,
    quick_limit_s=5.0,
)

_FIGURE5 = Figure(
    name="figure5",
    title="Capuchin against the optimum, ResNet-18",
    paper="Capuchin takes 73 to 141 % more energy than with full memory, POET less than 1 % more.",
    grids=tuple(
        FigureGrid(
            models=models,
            devices=(device,),
            ram=("15%", *_BUDGETS),
            quick_ram=_QUICK_BUDGETS,
            methods=("capuchin", "offload-all", "optimal"),
            deadline_counts=counts,
        )
        for models, device, counts in (
            (("paper/resnet18-cifar", "resnet18-cifar"), "paper-a72", COMPUTE),
            (("resnet18-cifar",), "rpi4b", None),
            (("paper/resnet18-cifar",), "paper-m4", COMPUTE),
        )
    ),
    limit_s=60.0,
    quick_limit_s=5.0,
)

_TABLE3 = Figure(
    name="table3",
    title="POFO against the optimum on the TX2: peak RAM and time, ResNet-18",
    paper="POFO takes 311,808 kB and 94.79 ms, POET 285,873 kB and 82.36 ms: 8.3 % less memory, "
    "13 % less time.",
    grids=tuple(
        FigureGrid(
            models=(model,),
            devices=("jetson-tx2",),
            ram=ram,
            quick_ram=quick_ram,
            deadlines=deadlines,
            methods=methods,
        )
        for model, ram, quick_ram in (
            ("paper/resnet18-cifar", _BUDGETS, _QUICK_BUDGETS),
            ("resnet18-cifar", _BUDGETS, _QUICK_BUDGETS),
            ("paper/resnet18", ("40%", "50%", "60%", "70%", "80%", "90%"), ("50%", "70%")),
            ("resnet18", ("50%", "60%", "70%", "80%", "90%"), ("50%", "70%")),
        )
        # POFO minimizes time, `optimal` energy: a second grid limits the time of `optimal`.
        for methods, deadlines in ((("pofo", "optimal"), (None,)), (("optimal",), ("100.05%",)))
    ),
    limit_s=60.0,
    quick_limit_s=5.0,
)

FIGURES: Final[Mapping[str, Figure]] = MappingProxyType(
    {entry.name: entry for entry in (_FIGURE2, _FIGURE3, _FIGURE4, _FIGURE5, _TABLE3)}
)
"""The figures and tables, by name."""


def find_figure(name: str) -> Figure:
    """Return a figure by its name; raise `InputError` for an unknown name."""
    if name not in FIGURES:
        raise InputError(f"bench {name!r}: expected one of {', '.join(FIGURES)}, instances, check")
    return FIGURES[name]
