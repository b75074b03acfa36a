"""Choice to explore: a network or file with its options, on a device, for an aim."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from poetmodel.device import Costs, Device
from poetmodel.device.io import device_names
from poetmodel.errors import InputError, shown
from poetmodel.graph.catalogue import (
    DEFAULT_SHAPE,
    InputShape,
    Variant,
    load_file,
    load_model,
    model_names,
)
from poetmodel.graph.zoo.state import STATES
from poetmodel.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep

MOST_TEXT: Final = 200
"""Most characters of a name."""
State = Literal[STATES]  # type: ignore[valid-type]
"""Kinds of state in the graph."""
Size = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]


class ExplorerChoice(BaseModel):
    """Everything of a problem but its RAM and its deadline, which the sliders give."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Text
    device: Text
    batch: Size | None = None
    image: Size | None = None
    sequence: Size | None = None
    state: State | None = None
    in_place: bool = False
    tile: Text | None = None
    train: Text | None = None
    paging: bool = True
    recompute: bool = True
    minimize: Literal["energy", "time", "ram", "writes"] = "energy"
    deadline_counts: Literal["compute", "serial", "overlap"] | None = None
    aux_bytes: Annotated[int, Field(ge=0)] | None = None
    count_parameters: bool = False
    commit: Size | None = None

    @property
    def shape(self) -> Variant:
        """The sizes of the input, and what of the state is in the graph."""
        sizes = {name: getattr(self, name) for name in Variant.__dataclass_fields__}
        return Variant(**sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A graph, with its name and options on a command line."""

    graph: Graph
    name: str
    """A built-in network, or the path of a file."""
    shape: InputShape = DEFAULT_SHAPE
    step: LoweredStep | None = None
    """Captured step, if the file is a step file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Available choices: everything built in, and the files of the command line.

    A browser names files as they are shown, never by a path.
    """

    graphs: Mapping[str, str] = field(default_factory=dict)
    """Paths of graph files, by the name that is shown."""
    steps: Mapping[str, str] = field(default_factory=dict)
    """Paths of step files."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Paths of device files."""
    profiles: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """Paths of measured costs, each with the device that they were measured on."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the catalogue that `to_json` wrote."""
        values = json.loads(text)
        values["profiles"] = {name: tuple(pair) for name, pair in values["profiles"].items()}
        return cls(**values)

    def to_json(self) -> str:
        """Return it as text, for another process."""
        return json.dumps(asdict(self))

    def models(self) -> list[dict[str, str]]:
        """Return the names of all graphs, each with its group."""
        groups = {
            "your file": [*self.graphs, *self.steps],
            "network": [name for name in model_names() if not name.startswith("paper/")],
            "published graph": [name for name in model_names() if name.startswith("paper/")],
        }
        return [{"name": name, "group": group} for group, names in groups.items() for name in names]

    def device_list(self) -> list[dict[str, Any]]:
        """Return the names of all devices, each with its RAM [B]."""
        names = (*self.profiles, *self.devices, *device_names())
        return [{"name": name, "ram_bytes": self._ram_bytes(name)} for name in names]

    def source(self, choice: ExplorerChoice) -> Source:
        """Read or make the graph of a choice."""
        name, shape = choice.model, choice.shape
        if name in self.steps:
            from poetmodel.lowered.io import load_step
            from poetmodel.tiling.choice import divide_step

            if shape.overrides.keys() - {"tile"}:
                raise InputError(f"{name}: a step file has fixed sizes and state; leave these out")
            path = self.steps[name]
            step = divide_step(load_step(path), choice.tile)
            return Source(graph=step.graph, name=path, shape=shape, step=step)
        if name in self.graphs:
            path = self.graphs[name]
            return Source(graph=load_file(path, shape), name=path, shape=shape)
        if name not in model_names():
            raise InputError(f"model {shown(name)}: expected one of the list")
        return Source(graph=load_model(name, shape), name=name, shape=shape)

    def cost_options(self, choice: ExplorerChoice) -> tuple[str | None, str | None]:
        """Return the device and the profile of a choice as a command line names them."""
        if choice.device in self.profiles:
            profile, device = self.profiles[choice.device]
            return device, profile
        return self.devices.get(choice.device, choice.device), None

    def costs(self, graph: Graph, choice: ExplorerChoice) -> Costs:
        """Return the costs of a graph on the device of a choice."""
        name = choice.device
        if name not in {*self.profiles, *self.devices, *device_names()}:
            raise InputError(f"device {shown(name)}: expected one of the list")
        device, profile = self.cost_options(choice)
        known = None if device is None else Device.load(device)
        if profile is not None:
            return Costs.load(profile, device=known)
        return Costs.estimate(graph, Device.load(name) if known is None else known)

    def problem(self, choice: ExplorerChoice, graph: Graph, costs: Costs) -> Problem:
        """Return the problem of a choice without a deadline, with the device's RAM."""
        return Problem(
            graph,
            costs,
            ram="100%" if costs.device is None else None,
            deadline_counts=choice.deadline_counts,
            aux_bytes=choice.aux_bytes,
            recompute=choice.recompute,
            paging=choice.paging,
            minimize=choice.minimize,
            count_parameters=choice.count_parameters,
            commit=choice.commit,
        )

    def _ram_bytes(self, name: str) -> int | None:
        device = self.profiles[name][1] if name in self.profiles else self.devices.get(name, name)
        return None if device is None else Device.load(device).ram_bytes


def of_files(
    *,
    graph: str | None = None,
    step: str | None = None,
    device: str | None = None,
    profile: str | None = None,
) -> Catalogue:
    """Return the catalogue with the files of a command line beside what is built in."""
    known = device in device_names()
    return Catalogue(
        graphs={} if graph is None else {_shown(graph): str(Path(graph).absolute())},
        steps={} if step is None else {_shown(step): str(Path(step).absolute())},
        devices={} if device is None or known else {_shown(device): str(Path(device).absolute())},
        profiles={}
        if profile is None
        else {
            _shown(profile): (
                str(Path(profile).absolute()),
                device if device is None or known else str(Path(device).absolute()),
            )
        },
    )


def _shown(path: str) -> str:
    return Path(path).name[:MOST_TEXT]


def fingerprint(problem: Problem) -> str:
    """Return an identifier of a problem, whatever its RAM and its deadline are."""
    limits = problem.to_dict()
    for key in ("ram_budget_bytes", "deadline_s"):
        del limits[key]
    device = problem.costs.device
    costs = [asdict(problem.table), None if device is None else asdict(device)]
    stated = json.dumps([problem.graph.sha256, limits, costs], sort_keys=True, default=str)
    return hashlib.sha256(stated.encode()).hexdigest()[:20]
