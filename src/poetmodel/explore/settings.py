"""Settings of an explored problem: a network or file with options, a device, and an objective."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator
from pydantic_core import PydanticCustomError

from poetmodel.case.case import Case
from poetmodel.case.spelling import UNEXPLORED_LIMITS
from poetmodel.device import Device
from poetmodel.device.io import device_names
from poetmodel.errors import InputError, quote
from poetmodel.graph.catalogue import Variant, model_names
from poetmodel.problem import Limits, Quantity
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from poetmodel.problem import Problem

MAX_TEXT: Final = 200
"""Maximum length of a name or of the value of an option [characters]."""
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
"""Name of a graph or device."""
EXPLORED_LIMITS: Final = tuple(
    entry.name
    for entry in fields(Limits)
    if entry.name not in {"ram", "deadline", "constraints", *UNEXPLORED_LIMITS}
)
"""All limits but RAM and deadline, which the sliders set, and those that are not explored."""


class ExplorerSettings(BaseModel):
    """All settings of an explored problem except RAM and deadline, which the sliders set.

    In JSON, the fields of `shape` and the `EXPLORED_LIMITS` are beside `model` and `device`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ShortText
    device: ShortText
    shape: InstanceOf[Variant] = Variant()
    limits: InstanceOf[Limits] = Limits(minimize=Quantity.ENERGY)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, values: Any) -> Any:
        """Read graph and limits from JSON; graph and problem check the values themselves."""
        if not isinstance(values, dict):
            return values
        stated = dict(values)
        for group in ("shape", "limits"):
            default = cls.model_fields[group].default
            own = {name: stated.pop(name) for name in _NAMES[group] if name in stated}
            for name, value in own.items():
                _check_setting(name, value)
            if own:
                stated[group] = replace(default, **own)
        return stated

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values, for the page."""
        shown = {name: getattr(self.limits, name) for name in EXPLORED_LIMITS}
        return {"model": self.model, "device": self.device, **asdict(self.shape), **shown}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return all settings but `model` and `device` with their defaults, for the page."""
        values = cls(model="-", device="-").to_dict()
        return {name: values[name] for names in _NAMES.values() for name in names}


_NAMES: Final = {
    "shape": tuple(entry.name for entry in fields(Variant)),
    "limits": EXPLORED_LIMITS,
}
"""Names in JSON of the fields of each group of `ExplorerSettings`."""


def _check_setting(name: str, value: object) -> None:
    """Raise a validation error unless a value is a count, a short text, a switch or null."""
    is_count = isinstance(value, int) and 0 <= value <= MAX_BYTES
    is_text = isinstance(value, str) and 0 < len(value) <= MAX_TEXT
    if value is not None and not is_count and not is_text:
        raise PydanticCustomError(
            "setting", "{name}: expected a count, a short text, true, false or null", {"name": name}
        )


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
            shape=settings.shape,
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
