"""The choice to explore: a network or file with options, a device, and an objective."""

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

MAX_TEXT: Final = 200
"""Maximum length of a name."""
State = Literal[STATES]  # type: ignore[valid-type]
"""Optimizers whose state may be in the graph."""
Size = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class ExplorerChoice(BaseModel):
    """All properties of a problem except RAM and deadline, which the sliders set."""

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
        """Sizes of the input, and the options of its state."""
        sizes = {name: getattr(self, name) for name in Variant.__dataclass_fields__}
        return Variant(**sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A graph, with its name and options on a command line."""

    graph: Graph
    name: str
    """Name of a built-in network, or path of a file."""
    shape: InputShape = DEFAULT_SHAPE
    step: LoweredStep | None = None
    """Captured step, if the file is a step file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Available choices: everything built in, and the files on the command line.

    The browser refers to files by their displayed names, never by paths.
    """

    graphs: Mapping[str, str] = field(default_factory=dict)
    """Paths of graph files, by displayed name."""
    steps: Mapping[str, str] = field(default_factory=dict)
    """Paths of step files, by displayed name."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Paths of device files, by displayed name."""
    profiles: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """Paths of measured costs by displayed name, each with the device on which they were
    measured."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the catalogue from the text that `to_json` returned."""
        values = json.loads(text)
        values["profiles"] = {name: tuple(pair) for name, pair in values["profiles"].items()}
        return cls(**values)

    def to_json(self) -> str:
        """Return the catalogue as text, for another process."""
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
        """Read or build the graph of a choice."""
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
        """Return the device and the profile of a choice as on the command line."""
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
        device_values = None if device is None else Device.load(device)
        if profile is not None:
            return Costs.load(profile, device=device_values)
        return Costs.estimate(graph, Device.load(name) if device_values is None else device_values)

    def problem(self, choice: ExplorerChoice, graph: Graph, costs: Costs) -> Problem:
        """Return the problem of a choice without a deadline, with the device's RAM as budget."""
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


def catalogue_with_files(
    *,
    graph: str | None = None,
    step: str | None = None,
    device: str | None = None,
    profile: str | None = None,
) -> Catalogue:
    """Return the catalogue of everything built in and the given files."""
    is_built_in = device in device_names()
    return Catalogue(
        graphs={} if graph is None else {_displayed_name(graph): str(Path(graph).absolute())},
        steps={} if step is None else {_displayed_name(step): str(Path(step).absolute())},
        devices={}
        if device is None or is_built_in
        else {_displayed_name(device): str(Path(device).absolute())},
        profiles={}
        if profile is None
        else {
            _displayed_name(profile): (
                str(Path(profile).absolute()),
                device if device is None or is_built_in else str(Path(device).absolute()),
            )
        },
    )


def _displayed_name(path: str) -> str:
    return Path(path).name[:MAX_TEXT]


def fingerprint(problem: Problem) -> str:
    """Return a hash of a problem without its RAM and its deadline."""
    limits = problem.to_dict()
    for key in ("ram_budget_bytes", "deadline_s"):
        del limits[key]
    device = problem.costs.device
    costs = [asdict(problem.table), None if device is None else asdict(device)]
    text = json.dumps([problem.graph.sha256, limits, costs], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
