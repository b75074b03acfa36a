"""`Case`, and the commands that reproduce it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from poetmodel.budgets import Budget, TileChoice
from poetmodel.case.spelling import EXPORTED_LIMITS, stated_options
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import DEFAULT_SHAPE, InputShape, Variant, read_model_or_file
from poetmodel.problem import Limits
from poetmodel.solver.request import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem

NO_COSTS: Final = (
    "no costs: give --device NAME|FILE ('poetmodel devices' lists the names) or --profile FILE"
)
"""Error message if neither ``--device`` nor ``--profile`` is given."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph, a device, limits and options of a search, as a command line states them."""

    source: str | None = None
    """A built-in network, a graph file or a step file; None for the network that a file names."""
    shape: InputShape = DEFAULT_SHAPE
    """Input sizes and variant of the graph."""
    device: str | None = None
    profile: str | None = None
    limits: Limits = field(default_factory=Limits)
    constraint_files: tuple[str, ...] = ()
    """Files of user-defined constraints and objectives."""
    search: SearchOptions = field(default_factory=SearchOptions)
    step: LoweredStep | None = None
    """The step in memory; None for that of the source."""
    board: Device | None = None
    """The device in memory; None for that of `device`."""
    costs: Costs | None = None
    """Measured costs in memory; None for those of `profile`."""

    @property
    def is_step_file(self) -> bool:
        """Whether the source has the suffix of step files, whose graphs have exported kernels."""
        return self.source is not None and self.source.endswith(".step.json")

    @property
    def tile(self) -> str | None:
        """The stated tile size, as ``--tile`` accepts it."""
        return self.shape.tile if isinstance(self.shape, Variant) else None

    @property
    def has_graph(self) -> bool:
        """Whether the case states its graph."""
        return self.source is not None or self.step is not None

    @property
    def tries_tiles(self) -> bool:
        """Whether tile sizes are tried: ``auto`` of a step file, any of a step in memory."""
        is_auto = self.is_step_file and TileChoice.parse(self.tile).is_auto
        return is_auto or self.step is not None

    @property
    def names_nodes(self) -> bool:
        """Whether measured costs or constraints name nodes, which differ between tile sizes."""
        has_costs = self.profile is not None or self.costs is not None
        return has_costs or bool(self.constraint_files)

    def with_tile(self, tile: str | None) -> Self:
        """Return the case with a tile size, as ``--tile`` accepts it; None for no tiles."""
        if not isinstance(self.shape, Variant):
            return self
        return replace(self, shape=replace(self.shape, tile=tile))

    def load_device(self) -> Device | None:
        """Return the built-in device of this name, or read its file; None without a device."""
        from poetmodel.device import Device

        return self.board if self.device is None else Device.load(self.device)

    def load_profile(self, device: Device | None) -> Costs | None:
        """Read the measured costs of a device; None without a profile."""
        from poetmodel.device import Costs

        return self.costs if self.profile is None else Costs.load(self.profile, device=device)

    def load_whole_step(self) -> LoweredStep | None:
        """Read a step file, without tiles; None for other files, or with other settings."""
        if self.step is not None:
            return self.step
        if self.source is None or not self.is_step_file or self.shape.overrides.keys() - {"tile"}:
            return None
        from poetmodel.lowered.io import load_step

        return load_step(self.source)

    def load_step(self) -> LoweredStep | None:
        """Return the step of `load_whole_step`, in tiles of the stated size."""
        step = self.load_whole_step()
        if step is None:
            return None
        from poetmodel.tiling.choice import divide_step

        return divide_step(step, self.tile)

    def load_graph(self) -> Graph:
        """Build the network of the source, or read its file."""
        step = self.load_step() if self.step or "tile" in self.shape.overrides else None
        if step is not None:
            return step.graph
        if self.source is None:
            raise InputError("missing graph: give a network or a file")
        return read_model_or_file(self.source, self.shape)

    def load_costs(self, graph: Graph, *, default_device: str | None = None) -> Costs:
        """Return measured costs of the profile, else estimates for the device.

        `default_device` replaces a missing device, also that of a profile.
        """
        from poetmodel.device import Costs, Device

        device = self.load_device()
        if device is None and default_device is not None:
            device = Device.load(default_device)
        profile = self.load_profile(device)
        if profile is not None:
            return profile
        if device is None:
            raise InputError(NO_COSTS)
        return Costs.estimate(graph, device)

    def state_problem(self, graph: Graph) -> Problem:
        """Return the problem of the limits, and of files of constraints, for a graph."""
        from poetmodel.problem.io import state_problem

        return state_problem(graph, self.load_costs(graph), self.limits, self.constraint_files)

    def absolute_limits(self) -> Limits:
        """Return the limits; for a graph in tiles, a RAM budget in percent becomes a size.

        The percentage is of the keep-all peak without tiles.
        """
        if self.limits.ram is None or self.tile is None or not self.has_graph:
            return self.limits
        from poetmodel.graph import checkpoint_all_peak_bytes

        budget = Budget.parse(self.limits.ram)
        if budget.fraction is None:
            return self.limits
        keep_all_bytes = checkpoint_all_peak_bytes(self.with_tile(None).load_graph())
        return replace(self.limits, ram=str(budget.to_size(keep_all_bytes)))

    @property
    def limit_options(self) -> tuple[str, ...]:
        """The options of stated limits and constraints, such as ``--ram``."""
        names = tuple(row.option for row, _ in stated_options(self.limits))
        return (*names, "--constraints") if self.constraint_files else names

    @property
    def is_exportable(self) -> bool:
        """Whether ``poetmodel export`` solves the same problem in the same way."""
        stated = (*stated_options(self.limits), *stated_options(self.search))
        return (
            not self.constraint_files
            and self.search.backend == SearchOptions().backend
            and all(
                row.field in (*EXPORTED_LIMITS, "ram") or row.is_always_stated for row, _ in stated
            )
        )

    def command(self, name: str, *, out: str, options: Mapping[str, str] | None = None) -> str:
        """Return the shell command `name` (``solve``, ``export``); `options` replace its own."""
        return shlex.join(["poetmodel", name, *self._arguments(name, out, options or {})])

    def verification_command(self, file: str) -> str:
        """Return the shell command that verifies a schedule file of the case."""
        costs = [word for pair in self._sources() if pair[1] is not None for word in pair]
        graph = ("--graph", self.source or "", *self.shape.options)
        return shlex.join(["poetmodel", "verify", file, *graph, *map(str, costs)])

    def _arguments(self, name: str, out: str, options: Mapping[str, str]) -> list[str]:
        """List the arguments of a subcommand; `options` (values by option) replace stated ones."""
        stated = (*stated_options(self.limits), *stated_options(self.search))
        if name == "export":
            stated = tuple(entry for entry in stated if entry[0].option != "--backend")
        groups = [
            self.shape.options,
            *((option, value) for option, value in self._sources() if value is not None),
            *(arguments for _, arguments in stated),
            *(("--constraints", file) for file in self.constraint_files),
        ]
        own = [group for group in groups if group and group[0] not in options]
        return [
            self.source or "",
            *(argument for group in own for argument in group),
            *(word for pair in options.items() for word in pair),
            *("--out", out),
        ]

    def _sources(self) -> tuple[tuple[str, str | None], ...]:
        return ("--device", self.device), ("--profile", self.profile)
