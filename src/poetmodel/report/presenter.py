"""The presenter: facts, each named once, become values of JSON and rows of tables and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poetmodel.device.room import room_figures
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from poetmodel.device.room import DeviceRoom

Unit = Callable[[Any], str]
"""How people read a value."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A named figure."""

    key: str
    """Its path in JSON, keys with points between them; empty if JSON does not have it."""
    value: Any
    """In SI units; None if it is not known."""
    name: str | None = None
    """Its name for people; None if only JSON has it."""
    unit: Unit = str
    note: str = ""
    """What people should know about it."""
    alarm: bool = False
    """Whether it says that something is wrong."""

    @property
    def text(self) -> str:
        """The value for people; empty if it is not known."""
        return "" if self.value is None else self.unit(self.value)


def row(name: str, text: str, note: str = "") -> Fact:
    """Return a fact that JSON does not have."""
    return Fact("", text, name, note=note)


def document(facts: Iterable[Fact]) -> dict[str, Any]:
    """Return the facts as a JSON object."""
    return {fact.key: fact.value for fact in facts if fact.key}


def rows(facts: Iterable[Fact]) -> Iterator[Fact]:
    """Yield the known facts that people read."""
    return (fact for fact in facts if fact.name is not None and fact.value is not None)


def room_facts(room: DeviceRoom | None) -> Iterator[Fact]:
    """Yield what a step takes of the RAM of its device; without a device it is not known."""
    for key, value in room_figures(room).items():
        if key == "device_ram_bytes" and room is not None:
            yield Fact(key, value, "device RAM", format_bytes, room.remark(), alarm=not room.fits)
        else:
            yield Fact(key, value)


Row = tuple[str, str, Unit]
"""The path of a value in JSON, its name and its unit."""
Parts = list[tuple[str, list[tuple[Fact, ...]]]]
"""Named parts of rows, with a fact for each of several JSON objects."""


def side_by_side(parts: Mapping[str, Sequence[Row]], objects: Sequence[Mapping[str, Any]]) -> Parts:
    """Return the facts of several JSON objects in rows, without empty rows and parts."""
    found: Parts = []
    for part, specified in parts.items():
        lines = [
            tuple(Fact(key, look_up(one, key), name, unit) for one in objects)
            for key, name, unit in specified
        ]
        kept = [line for line in lines if any(fact.value is not None for fact in line)]
        if kept:
            found.append((part, kept))
    return found


def look_up(found: Mapping[str, Any], key: str) -> Any:
    """Return the value at a path of keys, None where the path ends early."""
    value: Any = found
    for name in key.split("."):
        if value is None:
            return None
        value = value.get(name)
    return value


# -- words -------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Return a text with control characters spelled out, so that no name can steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def count(value: float | None) -> str:
    """Return a count for people, ready for a unit: ``11.69 M``, ``512``."""
    if value is None:
        return "unknown"
    for letter, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {letter}"
    return f"{value:.4g} "


def percent(ratio: float, *, digits: int = 5, places: int = 5) -> str:
    """Return a ratio as a percentage for people: ``12.5 %``."""
    return f"{round(100 * ratio, places):.{digits}g} %"


def share(ratio: float) -> str:
    """Return a ratio as a percentage of four digits: ``0.3329 %``."""
    return percent(ratio, digits=4, places=6)


def whole(value: float) -> str:
    """Return a number with all its digits: ``12,345``."""
    return f"{value:,.12g}"


def yes_or_no(value: object) -> str:
    """Return ``yes`` or ``no``."""
    return "yes" if value else "no"


def plural(number: int, noun: str) -> str:
    """Return a number of things: ``12 tensors``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def whole_bytes(size: float) -> str:
    """Return a size in bytes, and in a larger unit if it has one: ``1,536 B (1.50 KiB)``."""
    rounded = format_bytes(size)
    exact = f"{size:,.0f} B"
    return exact if rounded == exact else f"{exact} ({rounded})"


def fine_joules(energy_j: float) -> str:
    """Return an energy with seven digits, so that close bounds look different."""
    for prefix, factor in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if abs(energy_j) >= factor:
            return f"{energy_j / factor:,.7g} {prefix}J"
    return f"{energy_j:.7g} J"
