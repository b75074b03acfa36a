"""The presenter: facts, each named once, become values of JSON and rows of tables and pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import GAUGE_KEY, DeviceRam, device_ram_metrics, format_gauge, gauge
from poetmodel.problem.totals import unit_of_terms
from poetmodel.schedule.metrics import Display, Group, MetricUnit, metrics_at
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.plan import PlanCheck
    from poetmodel.problem import Constraint
    from poetmodel.schedule import ConstraintValue, Simulation

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
    """Remarks for the reader."""
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


def room_facts(room: DeviceRam | None) -> Iterator[Fact]:
    """Yield what a step takes of the RAM of its device; without a device it is not known."""
    for key, value in device_ram_metrics(room).items():
        if key == "device_ram_bytes" and room is not None:
            yield Fact(key, value, "device RAM", format_bytes, room.remark(), alarm=not room.fits)
        else:
            yield gauge_fact(key, "of it", room) if key == GAUGE_KEY else Fact(key, value)


def gauge_fact(key: str, name: str, room: DeviceRam | None) -> Fact:
    """Return the free RAM of a device, and the parts of the used RAM; resident bytes count."""
    sizes = gauge(room)
    note = "" if sizes is None else format_gauge(sizes)[1]
    if room is not None and room.resident_bytes:
        note += "; resident bytes included"
    return Fact(key, sizes, name, lambda value: format_gauge(value)[0], note)


def state_figures(graph: Graph, simulation: Simulation) -> dict[str, int] | None:
    """Return the bytes of a graph's state by home; None without state."""
    if not graph.state_tensors:
        return None
    sizes, apart = graph.tensor_bytes, set(graph.state_tensors) - simulation.resident
    read = {i: simulation.page_ins.get(i, 0) for i in apart}
    back = [new for old, new in graph.replacement_of.items() if old in apart]
    return {
        "tensors": len(graph.state_tensors),
        "resident": len(simulation.resident),
        "resident_bytes": sum(sizes[i] for i in simulation.resident),
        "on_storage_bytes": sum(sizes[i] for i in apart),
        "read_bytes": sum(sizes[i] * times for i, times in read.items()),
        "written_back_bytes": sum(sizes[i] * simulation.page_outs.get(i, 0) for i in back),
    }


def state_facts(graph: Graph, simulation: Simulation) -> Iterator[Fact]:
    """Yield how much state is in RAM, how much on storage, and what that moves."""
    sizes = state_figures(graph, simulation)
    if sizes is None:
        return
    yield Fact("state", sizes)
    resident, tensors = sizes["resident"], sizes["tensors"]
    note = f"{resident} of {plural(tensors, 'tensor')} in RAM throughout"
    yield row("resident state", format_bytes(sizes["resident_bytes"]), note)
    if resident < tensors:
        read, back = (format_bytes(sizes[f"{key}_bytes"]) for key in ("read", "written_back"))
        how = f"{read} read" if sizes["read_bytes"] else "read where it lies"
        note = f"{plural(tensors - resident, 'tensor')}: {how}, {back} written back a step"
        yield row("state on storage", format_bytes(sizes["on_storage_bytes"]), note)


def metric_facts(
    display: Display,
    simulation: Simulation | PlanCheck,
    *groups: Group,
    timed: bool = True,
    notes: Mapping[str, str] | None = None,
    unlisted: Collection[str] = (),
) -> Iterator[Fact]:
    """Yield the metrics of a display as facts, in its order.

    Parameters
    ----------
    display : Display
        The document or table.
    simulation : Simulation or PlanCheck
        Where the metrics are read.
    *groups : Group
        The groups of metrics.
    timed : bool
        Whether there are costs; without them energies and times are None.
    notes : mapping of str to str, optional
        Remarks for the reader, by key.
    unlisted : collection of str
        Keys of metrics that the table leaves out this time.
    """
    notes = notes or {}
    for metric in metrics_at(display, *groups):
        if metric.read is None:
            continue
        known = timed or not metric.needs_costs
        value = metric.read(simulation) if known else None
        listed = display in metric.tables and metric.key not in unlisted
        name, unit = metric.name if listed else None, METRIC_UNITS[metric.unit]
        yield Fact(metric.key, value, name, unit, notes.get(metric.key, ""))


def page_rows(*groups: Group) -> tuple[Row, ...]:
    """Return the rows of a report page for the metrics of groups."""
    return tuple(
        (metric.key, metric.page_name or metric.name, PAGE_UNITS[metric.unit])
        for metric in metrics_at(Display.PAGE, *groups)
    )


def wear_facts(display: Display, simulation: Simulation) -> Iterator[Fact]:
    """Yield the number of steps that the storage endures; tables leave it out if unknown."""
    note = _wear_note(simulation.written_bytes)
    yield from metric_facts(display, simulation, Group.WEAR, notes={"steps_until_worn": note})


def wear_fact(steps: float | None, written_bytes: int) -> Fact:
    """Return the number of steps that the storage endures at so many written bytes."""
    return Fact("steps_until_worn", steps, "storage worn", _steps, _wear_note(written_bytes))


def _wear_note(written_bytes: int) -> str:
    return f"at {format_bytes(written_bytes)} written a step"


def _steps(number: float) -> str:
    return f"after {count(number)}steps"


MOST_CONSTRAINTS: Final = 20
"""Maximum number of user constraints shown; JSON has all of them."""


def constraint_facts(values: Sequence[ConstraintValue]) -> Iterator[Fact]:
    """Yield what the sums of own constraints are, and their limits."""
    if not values:
        return
    yield Fact("constraints", [value.to_dict() for value in values])
    shown = _foremost(values)
    for value in shown:
        yield Fact(
            "",
            value.value,
            value.row.name,
            amount_of(value.row),
            _state(value),
            bool(value.violated_side),
        )
    if len(shown) < len(values):
        more = plural(len(values) - len(shown), "constraint")
        at_limit = sum(value.at_limit for value in values)
        yield row("", f"and {more} more", f"{at_limit} of all are at a limit")


def constraint_rows(several: Sequence[Sequence[ConstraintValue]]) -> Iterator[tuple[Fact, ...]]:
    """Yield the facts about own constraints of several schedules in rows, one for each name."""
    places = [{value.row.name: index for index, value in enumerate(values)} for values in several]
    foremost = [value.row.name for values in several for value in _foremost(values)]
    for name in dict.fromkeys(foremost):
        yield tuple(
            _constraint_cell(name, indices.get(name), values)
            for indices, values in zip(places, several, strict=True)
        )


def _constraint_cell(name: str, index: int | None, values: Sequence[ConstraintValue]) -> Fact:
    if index is None:
        return Fact("", None, name)
    constraint = values[index]
    amount = amount_of(constraint.row)
    return Fact(
        f"constraints.{index}.value",
        constraint.value,
        name,
        lambda value: f"{amount(value)}; {_state(constraint)}",
        alarm=bool(constraint.violated_side),
    )


def _foremost(values: Sequence[ConstraintValue]) -> Sequence[ConstraintValue]:
    """Return the constraints that people read of: all, or else those at a limit first."""
    if len(values) <= MOST_CONSTRAINTS:
        return values
    return sorted(values, key=lambda value: not (value.at_limit or value.violated_side))[
        :MOST_CONSTRAINTS
    ]


def _state(value: ConstraintValue) -> str:
    limits = value.row.describe_limits(amount_of(value.row))
    if value.violated_side:
        return f"{value.violated_side} its limit: {limits}"
    free = value.row.lower != value.row.upper
    return f"at its limit: {limits}" if value.at_limit and free else limits


def amount_of(row: Constraint) -> Unit:
    """Return the readable form of the sum of a user's constraint."""
    units = {"bytes": whole_bytes, "s": format_seconds, "J": fine_joules}
    return units.get(unit_of_terms(row.terms.items()), whole)


Row = tuple[str, str, Unit]
"""The path of a value in JSON, its name and its unit."""
Parts = list[tuple[str, list[tuple[Fact, ...]]]]
"""Named parts of rows, with a fact for each of several JSON objects."""


def side_by_side(parts: Mapping[str, Sequence[Row]], objects: Sequence[Mapping[str, Any]]) -> Parts:
    """Return the facts of several JSON objects in rows, without empty rows and parts."""
    sections: Parts = []
    for part, specified in parts.items():
        lines = [
            tuple(Fact(key, look_up(entry, key), name, unit) for entry in objects)
            for key, name, unit in specified
        ]
        kept = [line for line in lines if any(fact.value is not None for fact in line)]
        if kept:
            sections.append((part, kept))
    return sections


def look_up(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a path of keys and places, None where the path ends early."""
    value: Any = values
    for name in key.split("."):
        if value is None:
            return None
        value = value[int(name)] if isinstance(value, list) else value.get(name)
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


def measured(value: float, *, unit: str) -> str:
    """Return a figure of a device for people."""
    if unit == "B":
        return whole_bytes(value)
    if unit == "s":
        return format_seconds(value)
    plain = {"W": f"{value:.4g} W", "writes": f"{whole(value)} writes"}
    plain["times"] = f"{value:.4g} times"
    return plain.get(unit) or f"{count(value)}{unit}"


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


METRIC_UNITS: Final[Mapping[MetricUnit, Unit]] = {
    MetricUnit.BYTES: format_bytes,
    MetricUnit.SECONDS: format_seconds,
    MetricUnit.JOULES: format_joules,
    MetricUnit.FRACTION: percent,
    MetricUnit.STEPS: _steps,
    MetricUnit.COUNT: whole,
}
"""Forms of metrics in tables."""
PAGE_UNITS: Final[Mapping[MetricUnit, Unit]] = {
    **METRIC_UNITS,
    MetricUnit.BYTES: whole_bytes,
    MetricUnit.JOULES: fine_joules,
    MetricUnit.STEPS: whole,
}
"""Forms of metrics on report pages, which have more digits."""
