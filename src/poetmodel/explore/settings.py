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

from poetmodel.case.case import Case
from poetmodel.device import Device
from poetmodel.device.io import device_names
from poetmodel.errors import InputError, quote
from poetmodel.graph.catalogue import Variant, model_names
from poetmodel.graph.zoo.state import STATES
from poetmodel.problem import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from poetmodel.problem import Problem

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
        return Limits.read(self)

    @property
    def variant(self) -> Variant:
        """Input sizes, state, in-place operators, tiles and trained weights of the graph."""
        values = {name: getattr(self, name) for name in Variant.__dataclass_fields__}
        return Variant(**values)


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

    def case(self, settings: ExplorerSettings) -> Case:
        """Return the case of some settings without a deadline, with the device's RAM as budget.

        With a profile, the device is the one that was measured. If that is unknown, it is None, and
        the budget is the keep-all peak plus `Problem.resident_bytes`.
        """
        name = settings.model
        path = self.steps.get(name, self.graphs.get(name))
        if path is None and name not in model_names():
            raise InputError(f"model {quote(name)}: expected a listed model")
        device: str | None = self.devices.get(settings.device, settings.device)
        profile = None
        if settings.device in self.profiles:
            profile, device = self.profiles[settings.device]
        elif settings.device not in {*self.devices, *device_names()}:
            raise InputError(f"device {quote(settings.device)}: expected a listed device")
        limits = settings.limits
        return Case(
            source=path or name,
            shape=settings.variant,
            device=device,
            profile=profile,
            limits=limits if device is not None else replace(limits, ram="100%"),
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
