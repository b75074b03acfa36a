"""Facts with name, value and unit, as JSON objects and as rows of tables and pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import GAUGE_KEY, DeviceRam, device_ram_metrics, format_gauge, make_gauge
from poetmodel.problem.totals import unit_of_terms
from poetmodel.schedule.metrics import Display, Group, MetricUnit, metrics_at
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.plan import PlanCheck
    from poetmodel.problem import Constraint
    from poetmodel.schedule import ConstraintValue, Simulation

Unit = Callable[[Any], str]
"""Function that formats a value for display."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A named value."""

    key: str
    """Path in JSON, keys separated by dots; empty if JSON does not contain it."""
    value: Any
    """Value in SI units; None if unknown."""
    name: str | None = None
    """Name in tables and pages; None if only JSON contains it."""
    unit: Unit = str
    note: str = ""
    """Note for the reader."""
    alarm: bool = False
    """Whether the value indicates a problem."""

    @property
    def text(self) -> str:
        """Formatted value; empty if unknown."""
        return "" if self.value is None else self.unit(self.value)


def text_fact(name: str, text: str, note: str = "") -> Fact:
    """Return a fact with a text that JSON does not contain."""
    return Fact("", text, name, note=note)


def to_json_object(facts: Iterable[Fact]) -> dict[str, Any]:
    """Return the facts as a JSON object, without those that have no key."""
    return {fact.key: fact.value for fact in facts if fact.key}


def listed_facts(facts: Iterable[Fact]) -> Iterator[Fact]:
    """Yield the facts of a table: those with a name and a known value."""
    return (fact for fact in facts if fact.name is not None and fact.value is not None)


def room_facts(room: DeviceRam | None) -> Iterator[Fact]:
    """Yield device RAM and its use by a step; the values are None without a device."""
    for key, value in device_ram_metrics(room).items():
        if key == "device_ram_bytes" and room is not None:
            yield Fact(
                key, value, "device RAM", format_bytes, room.format_remark(), alarm=not room.fits
            )
        else:
            yield gauge_fact(key, "of it", room) if key == GAUGE_KEY else Fact(key, value)


def gauge_fact(key: str, name: str, room: DeviceRam | None) -> Fact:
    """Return used and free RAM of a device as one fact, with the parts as note."""
    sizes = make_gauge(room)
    note = "" if sizes is None else format_gauge(sizes)[1]
    if room is not None and room.resident_bytes:
        note += "; resident bytes included"
    return Fact(key, sizes, name, lambda value: format_gauge(value)[0], note)


def state_figures(graph: Graph, simulation: Simulation) -> dict[str, int] | None:
    """Return counts and bytes of state by home, and of its transfers; None without state."""
    if not graph.state_tensors:
        return None
    sizes, on_storage = graph.tensor_bytes, set(graph.state_tensors) - simulation.resident
    page_in_counts = {i: simulation.page_ins.get(i, 0) for i in on_storage}
    replacements = [new for old, new in graph.replacement_of.items() if old in on_storage]
    return {
        "tensors": len(graph.state_tensors),
        "resident": len(simulation.resident),
        "resident_bytes": sum(sizes[i] for i in simulation.resident),
        "on_storage_bytes": sum(sizes[i] for i in on_storage),
        "read_bytes": sum(sizes[i] * times for i, times in page_in_counts.items()),
        "written_back_bytes": sum(sizes[i] * simulation.page_outs.get(i, 0) for i in replacements),
    }


def state_facts(graph: Graph, simulation: Simulation) -> Iterator[Fact]:
    """Yield the state in RAM, the state on storage and its transfers; nothing without state."""
    sizes = state_figures(graph, simulation)
    if sizes is None:
        return
    yield Fact("state", sizes)
    resident, tensors = sizes["resident"], sizes["tensors"]
    note = f"{resident} of {plural(tensors, 'tensor')} in RAM throughout"
    yield text_fact("resident state", format_bytes(sizes["resident_bytes"]), note)
    if resident < tensors:
        read, back = (format_bytes(sizes[f"{key}_bytes"]) for key in ("read", "written_back"))
        access = f"{read} read" if sizes["read_bytes"] else "read in place"
        note = f"{plural(tensors - resident, 'tensor')}: {access}, {back} written back a step"
        yield text_fact("state on storage", format_bytes(sizes["on_storage_bytes"]), note)


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
        Source of the values.
    *groups : Group
        The groups of metrics.
    timed : bool
        Whether costs are known; otherwise energies and times are None.
    notes : mapping of str to str, optional
        Notes for the reader, by key.
    unlisted : collection of str
        Keys of metrics that the table omits.
    """
    notes = notes or {}
    for metric in metrics_at(display, *groups):
        if metric.value_of is None:
            continue
        is_known = timed or not metric.needs_costs
        value = metric.value_of(simulation) if is_known else None
        is_listed = display in metric.tables and metric.key not in unlisted
        name, format_value = metric.name if is_listed else None, METRIC_UNITS[metric.unit]
        yield Fact(metric.key, value, name, format_value, notes.get(metric.key, ""))


def page_rows(*groups: Group) -> tuple[Row, ...]:
    """Return the rows of a report page for groups of metrics."""
    return tuple(
        (metric.key, metric.page_name or metric.name, PAGE_UNITS[metric.unit])
        for metric in metrics_at(Display.PAGE, *groups)
    )


def wear_facts(display: Display, simulation: Simulation) -> Iterator[Fact]:
    """Yield the number of steps until storage is worn; tables omit it if unknown."""
    note = _wear_note(simulation.written_bytes)
    yield from metric_facts(display, simulation, Group.WEAR, notes={"steps_until_worn": note})


def wear_fact(steps: float | None, written_bytes: int) -> Fact:
    """Return the number of steps until storage is worn, given the bytes written per step."""
    return Fact("steps_until_worn", steps, "storage worn", _steps, _wear_note(written_bytes))


def _wear_note(written_bytes: int) -> str:
    return f"at {format_bytes(written_bytes)} written a step"


def _steps(number: float) -> str:
    return f"after {format_count(number)}steps"


MAX_CONSTRAINTS: Final = 20
"""Maximum number of user-defined constraints in a table; JSON contains all."""


def constraint_facts(values: Sequence[ConstraintValue]) -> Iterator[Fact]:
    """Yield the sums of user-defined constraints, with their limits as notes."""
    if not values:
        return
    yield Fact("constraints", [value.to_dict() for value in values])
    selected = _select_constraints(values)
    for value in selected:
        yield Fact(
            "",
            value.value,
            value.row.name,
            unit_of_constraint(value.row),
            _limit_note(value),
            bool(value.violated_side),
        )
    if len(selected) < len(values):
        more = plural(len(values) - len(selected), "constraint")
        at_limit = sum(value.at_limit for value in values)
        yield text_fact("", f"and {more} more", f"{at_limit} of all are at a limit")


def constraint_rows(several: Sequence[Sequence[ConstraintValue]]) -> Iterator[tuple[Fact, ...]]:
    """Yield one row per user-defined constraint with the facts about it of several schedules."""
    places = [{value.row.name: index for index, value in enumerate(values)} for values in several]
    foremost = [value.row.name for values in several for value in _select_constraints(values)]
    for name in dict.fromkeys(foremost):
        yield tuple(
            _constraint_cell(name, indices.get(name), values)
            for indices, values in zip(places, several, strict=True)
        )


def _constraint_cell(name: str, index: int | None, values: Sequence[ConstraintValue]) -> Fact:
    """Return the value of a schedule's constraint with its limit; empty without one."""
    if index is None:
        return Fact("", None, name)
    constraint = values[index]
    amount = unit_of_constraint(constraint.row)
    return Fact(
        f"constraints.{index}.value",
        constraint.value,
        name,
        lambda value: f"{amount(value)}; {_limit_note(constraint)}",
        alarm=bool(constraint.violated_side),
    )


def _select_constraints(values: Sequence[ConstraintValue]) -> Sequence[ConstraintValue]:
    """Return the constraints to display: at most `MAX_CONSTRAINTS`, those at a limit first."""
    if len(values) <= MAX_CONSTRAINTS:
        return values
    return sorted(values, key=lambda value: not (value.at_limit or value.violated_side))[
        :MAX_CONSTRAINTS
    ]


def _limit_note(value: ConstraintValue) -> str:
    limits = value.row.describe_limits(unit_of_constraint(value.row))
    if value.violated_side:
        return f"{value.violated_side} its limit: {limits}"
    free = value.row.lower != value.row.upper
    return f"at its limit: {limits}" if value.at_limit and free else limits


def unit_of_constraint(row: Constraint) -> Unit:
    """Return the format function for the sum of a user-defined constraint."""
    units = {"bytes": whole_bytes, "s": format_seconds, "J": fine_joules}
    return units.get(unit_of_terms(row.terms.items()), format_number)


Row = tuple[str, str, Unit]
"""Path of a value in JSON, its name and its format function."""
Parts = list[tuple[str, list[tuple[Fact, ...]]]]
"""Named parts of rows; a row has one fact for each of several JSON objects."""


def compare_objects(
    parts: Mapping[str, Sequence[Row]], objects: Sequence[Mapping[str, Any]]
) -> Parts:
    """Return the facts of several JSON objects in rows, without empty rows and parts."""
    sections: Parts = []
    for part, specified in parts.items():
        lines = [
            tuple(Fact(key, value_at_path(entry, key), name, format_value) for entry in objects)
            for key, name, format_value in specified
        ]
        known_lines = [line for line in lines if any(fact.value is not None for fact in line)]
        if known_lines:
            sections.append((part, known_lines))
    return sections


def value_at_path(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a path of keys and list indices; None if the path does not exist."""
    value: Any = values
    for name in key.split("."):
        if value is None:
            return None
        value = value[int(name)] if isinstance(value, list) else value.get(name)
    return value


# -- formats -----------------------------------------------------------------------------------


def escape_controls(text: str) -> str:
    """Replace control characters by escapes, so that a name cannot control a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_count(value: float | None) -> str:
    """Format a count with a metric prefix, ready for a unit: ``11.69 M``, ``512``."""
    if value is None:
        return "unknown"
    for letter, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {letter}"
    return f"{value:.4g} "


def format_device_quantity(value: float, *, unit: str) -> str:
    """Format a device quantity with its unit for display."""
    if unit == "B":
        return whole_bytes(value)
    if unit == "s":
        return format_seconds(value)
    plain = {"W": f"{value:.4g} W", "writes": f"{format_number(value)} writes"}
    plain["times"] = f"{value:.4g} times"
    return plain.get(unit) or f"{format_count(value)}{unit}"


def format_percent(ratio: float, *, digits: int = 5, places: int = 5) -> str:
    """Format a ratio as a percentage: ``12.5 %``."""
    return f"{round(100 * ratio, places):.{digits}g} %"


def format_ratio(ratio: float) -> str:
    """Format a ratio as a percentage of four digits: ``0.3329 %``."""
    return format_percent(ratio, digits=4, places=6)


def format_number(value: float) -> str:
    """Format a number with all its digits: ``12,345``."""
    return f"{value:,.12g}"


def yes_or_no(value: object) -> str:
    """Return ``yes`` for a true value, else ``no``."""
    return "yes" if value else "no"


def plural(number: int, noun: str) -> str:
    """Format a number of items: ``12 tensors``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def whole_bytes(size: float) -> str:
    """Format a size in bytes, and in a larger unit if it has one: ``1,536 B (1.50 KiB)``."""
    rounded = format_bytes(size)
    exact = f"{size:,.0f} B"
    return exact if rounded == exact else f"{exact} ({rounded})"


def fine_joules(energy_j: float) -> str:
    """Format an energy with seven digits, so that close bounds are distinguishable."""
    for prefix, factor in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if abs(energy_j) >= factor:
            return f"{energy_j / factor:,.7g} {prefix}J"
    return f"{energy_j:.7g} J"


METRIC_UNITS: Final[Mapping[MetricUnit, Unit]] = {
    MetricUnit.BYTES: format_bytes,
    MetricUnit.SECONDS: format_seconds,
    MetricUnit.JOULES: format_joules,
    MetricUnit.FRACTION: format_percent,
    MetricUnit.STEPS: _steps,
    MetricUnit.COUNT: format_number,
}
"""Formats of metrics in tables."""
PAGE_UNITS: Final[Mapping[MetricUnit, Unit]] = {
    **METRIC_UNITS,
    MetricUnit.BYTES: whole_bytes,
    MetricUnit.JOULES: fine_joules,
    MetricUnit.STEPS: format_number,
}
"""Formats of metrics on report pages, which have more digits."""
