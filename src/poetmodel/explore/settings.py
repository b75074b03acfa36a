"""Settings of an explored problem: a network or file with options, a device, and an objective."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from poetmodel.device import Costs, Device
from poetmodel.device.io import device_names
from poetmodel.errors import InputError, quote
from poetmodel.graph.catalogue import (
    DEFAULT_SHAPE,
    InputShape,
    Variant,
    load_file,
    load_model,
    model_names,
)
from poetmodel.graph.zoo.state import STATES
from poetmodel.problem import Limits, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep

MAX_TEXT: Final = 200
"""Maximum length of a name or of the value of an option [characters]."""
StateName = Literal[STATES]  # type: ignore[valid-type]
"""Optimizers whose state may be in the graph, or ``frozen`` for parameters that are only read."""
PositiveInt = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]
"""Input size or count, from 1 to 1,000,000."""
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
"""Name of a graph or device, or value of an option."""


class ExplorerSettings(BaseModel):
    """All settings of an explored problem except RAM and deadline, which the sliders set.

    Except `model` and `device`, each field is also a field of `Variant` or of `Problem`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ShortText
    device: ShortText
    batch: PositiveInt | None = None
    image: PositiveInt | None = None
    sequence: PositiveInt | None = None
    state: StateName | None = None
    in_place: bool = False
    tile: ShortText | None = None
    train: ShortText | None = None
    paging: bool = True
    recompute: bool = True
    minimize: Literal["energy", "time", "ram", "writes"] = "energy"
    deadline_counts: Literal["compute", "serial", "overlap"] | None = None
    aux_bytes: Annotated[int, Field(ge=0)] | None = None
    count_parameters: bool = False
    commit: PositiveInt | None = None

    @classmethod
    def of_limits(cls, limits: Limits) -> dict[str, Any]:
        """Return the settings that are limits, by name; settings that are not stated are absent."""
        values = {entry.name: getattr(limits, entry.name) for entry in dataclass_fields(Limits)}
        return {
            name: value
            for name, value in values.items()
            if name in cls.model_fields and value is not None
        }

    @property
    def limits(self) -> Limits:
        """All limits but RAM and deadline, which the sliders set."""
        names = {entry.name for entry in dataclass_fields(Limits)}
        return Limits(**{name: value for name, value in self if name in names})

    @property
    def variant(self) -> Variant:
        """Input sizes, state, in-place operators, tiles and trained weights of the graph."""
        values = {name: getattr(self, name) for name in Variant.__dataclass_fields__}
        return Variant(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSource:
    """A graph, with its name and variant on a command line."""

    graph: Graph
    name: str
    """Name of a built-in network, or path of a file."""
    shape: InputShape = DEFAULT_SHAPE
    """Input sizes and options of the graph, as on a command line."""
    step: LoweredStep | None = None
    """Step of a step file, in tiles if the settings state a size; None for other graphs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Catalogue:
    """Available graphs and devices: everything built in, and the files on the command line.

    The browser refers to files by their displayed names, never by paths.
    """

    graphs: Mapping[str, str] = field(default_factory=dict)
    """Paths of graph files, by displayed name."""
    steps: Mapping[str, str] = field(default_factory=dict)
    """Paths of step files, by displayed name."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Paths of device files, by displayed name."""
    profiles: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """(path of measured costs, device on which they were measured), by displayed name. The device
    is a name or a path, or None if it is unknown."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the catalogue from the text that `to_json` returned."""
        values = json.loads(text)
        values["profiles"] = {name: tuple(pair) for name, pair in values["profiles"].items()}
        return cls(**values)

    def to_json(self) -> str:
        """Return the catalogue as text, for another process."""
        return json.dumps(asdict(self))

    def list_graphs(self) -> list[dict[str, str]]:
        """Return ``{name, group}`` for each graph: given files, networks, published graphs."""
        groups = {
            "your file": [*self.graphs, *self.steps],
            "network": [name for name in model_names() if not name.startswith("paper/")],
            "published graph": [name for name in model_names() if name.startswith("paper/")],
        }
        return [{"name": name, "group": group} for group, names in groups.items() for name in names]

    def list_devices(self) -> list[dict[str, Any]]:
        """Return ``{name, ram_bytes}`` for each profile and device; None for an unknown RAM [B]."""
        names = (*self.profiles, *self.devices, *device_names())
        return [{"name": name, "ram_bytes": self._ram_bytes(name)} for name in names]

    def load_source(self, settings: ExplorerSettings) -> GraphSource:
        """Read or build the graph of some settings."""
        name, shape = settings.model, settings.variant
        if name in self.steps:
            from poetmodel.lowered.io import load_step
            from poetmodel.tiling.choice import divide_step

            if shape.overrides.keys() - {"tile"}:
                raise InputError(
                    f"{name}: a step file has fixed sizes and state; leave out --batch, --state "
                    "and similar options"
                )
            path = self.steps[name]
            step = divide_step(load_step(path), settings.tile)
            return GraphSource(graph=step.graph, name=path, shape=shape, step=step)
        if name in self.graphs:
            path = self.graphs[name]
            return GraphSource(graph=load_file(path, shape), name=path, shape=shape)
        if name not in model_names():
            raise InputError(f"model {quote(name)}: expected a listed model")
        return GraphSource(graph=load_model(name, shape), name=name, shape=shape)

    def cost_options(self, settings: ExplorerSettings) -> tuple[str | None, str | None]:
        """Return the values of ``--device`` and ``--profile`` for some settings; None to omit one.

        With a profile, ``--device`` is the device that was measured, None if unknown.
        """
        if settings.device in self.profiles:
            profile, device = self.profiles[settings.device]
            return device, profile
        return self.devices.get(settings.device, settings.device), None

    def load_costs(self, graph: Graph, settings: ExplorerSettings) -> Costs:
        """Return the costs of a graph: measured if the device of the settings is a profile."""
        name = settings.device
        if name not in {*self.profiles, *self.devices, *device_names()}:
            raise InputError(f"device {quote(name)}: expected a listed device")
        device, profile = self.cost_options(settings)
        loaded_device = None if device is None else Device.load(device)
        if profile is not None:
            return Costs.load(profile, device=loaded_device)
        return Costs.estimate(graph, Device.load(name) if loaded_device is None else loaded_device)

    def build_problem(self, settings: ExplorerSettings, graph: Graph, costs: Costs) -> Problem:
        """Return the problem of some settings without a deadline, with the device's RAM as budget.

        Without a device, the budget is the keep-all peak plus `Problem.resident_bytes`.
        """
        ram = "100%" if costs.device is None else None
        return Problem.from_limits(graph, costs, replace(settings.limits, ram=ram))

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
    """Return a catalogue whose mappings have only the given files, which are not read.

    Paths become absolute. `profile` was measured on `device`, None if unknown.
    """
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


@cache
def parse_catalogue(text: str) -> Catalogue:
    """Return the catalogue of a JSON text; equal texts give the same object, a key of caches."""
    return Catalogue.from_json(text)


def _displayed_name(path: str) -> str:
    return Path(path).name[:MAX_TEXT]


def problem_fingerprint(problem: Problem) -> str:
    """Return a hash of a problem: graph, costs, device, and options except RAM and deadline."""
    limits = problem.to_dict()
    for key in ("ram_budget_bytes", "deadline_s"):
        del limits[key]
    device = problem.costs.device
    costs = [asdict(problem.table), None if device is None else asdict(device)]
    text = json.dumps([problem.graph.sha256, limits, costs], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
