"""Facts: named values with formats, which JSON, tables and pages contain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import GAUGE_KEY, DeviceRam, device_ram_metrics, make_gauge
from poetmodel.problem.totals import unit_of_terms
from poetmodel.report.device_ram import format_gauge, format_remark
from poetmodel.schedule.metrics import Display, Group, MetricUnit, metrics_at
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.plan import PlanCheck
    from poetmodel.problem import Constraint
    from poetmodel.schedule import ConstraintValue, Simulation

ValueFormatter = Callable[[Any], str]
"""Function that formats a value as text for tables and pages."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A named value."""

    key: str
    """Path in JSON, keys separated by dots; empty if JSON does not contain it."""
    value: Any
    """Value in SI units; None if unknown."""
    name: str | None = None
    """Name in tables and pages; None if only JSON contains it."""
    format_value: ValueFormatter = str
    """Formats the value for tables and pages."""
    note: str = ""
    """Note for the reader."""
    alarm: bool = False
    """Whether the value exceeds a limit; tables show such facts in red."""

    @property
    def text(self) -> str:
        """Formatted value; empty if unknown."""
        return "" if self.value is None else self.format_value(self.value)


def text_fact(name: str, text: str, note: str = "") -> Fact:
    """Return a fact with a text that JSON does not contain."""
    return Fact("", text, name, note=note)


def to_json_object(facts: Iterable[Fact]) -> dict[str, Any]:
    """Return the values of facts by key, as a JSON object; facts without a key are omitted."""
    return {fact.key: fact.value for fact in facts if fact.key}


def listed_facts(facts: Iterable[Fact]) -> Iterator[Fact]:
    """Yield the facts with a name and a known value, which tables list."""
    return (fact for fact in facts if fact.name is not None and fact.value is not None)


def device_ram_facts(device_ram: DeviceRam | None) -> Iterator[Fact]:
    """Yield resident bytes, RAM of a device, whether the step fits, and the device gauge."""
    for key, value in device_ram_metrics(device_ram).items():
        if key == "device_ram_bytes" and device_ram is not None:
            yield Fact(
                key,
                value,
                "device RAM",
                format_bytes,
                format_remark(device_ram),
                alarm=not device_ram.fits,
            )
        else:
            yield (
                gauge_fact(key, "device RAM use", device_ram)
                if key == GAUGE_KEY
                else Fact(key, value)
            )


def gauge_fact(key: str, name: str, device_ram: DeviceRam | None) -> Fact:
    """Return a fact with the gauge of `make_gauge`, displayed as the free or missing RAM."""
    sizes = make_gauge(device_ram)
    note = "" if sizes is None else format_gauge(sizes)[1]
    if note and device_ram is not None and device_ram.resident_bytes:
        note += "; resident bytes included"
    return Fact(key, sizes, name, lambda value: format_gauge(value)[0], note)


def state_metrics(graph: Graph, simulation: Simulation) -> dict[str, int] | None:
    """Return counts and bytes of state, its homes, reads and write-backs; None without state."""
    if not graph.state_tensors:
        return None
    sizes, on_storage = graph.tensor_bytes, set(graph.state_tensors) - simulation.resident
    page_in_counts = {i: simulation.page_ins.get(i, 0) for i in on_storage}
    replacements = [
        replacement
        for state_tensor, replacement in graph.replacement_of.items()
        if state_tensor in on_storage
    ]
    return {
        "tensors": len(graph.state_tensors),
        "resident": len(simulation.resident),
        "resident_bytes": sum(sizes[i] for i in simulation.resident),
        "on_storage_bytes": sum(sizes[i] for i in on_storage),
        "read_bytes": sum(sizes[i] * count for i, count in page_in_counts.items()),
        "written_back_bytes": sum(sizes[i] * simulation.page_outs.get(i, 0) for i in replacements),
    }


def state_facts(graph: Graph, simulation: Simulation) -> Iterator[Fact]:
    """Yield facts about state in RAM and on storage; the first has the `state_metrics` for JSON."""
    metrics = state_metrics(graph, simulation)
    if metrics is None:
        return
    yield Fact("state", metrics)
    n_resident, n_tensors = metrics["resident"], metrics["tensors"]
    note = f"{n_resident} of {format_items(n_tensors, 'tensor')} in RAM throughout"
    yield text_fact("resident state", format_bytes(metrics["resident_bytes"]), note)
    if n_resident < n_tensors:
        read_text, written_text = (
            format_bytes(metrics[f"{key}_bytes"]) for key in ("read", "written_back")
        )
        access_text = f"{read_text} read" if metrics["read_bytes"] else "read in place"
        tensors_text = format_items(n_tensors - n_resident, "tensor")
        note = f"{tensors_text}: {access_text}, {written_text} written back a step"
        yield text_fact("state on storage", format_bytes(metrics["on_storage_bytes"]), note)


def metric_facts(
    display: Display,
    simulation: Simulation | PlanCheck,
    *groups: Group,
    has_costs: bool = True,
    notes: Mapping[str, str] | None = None,
    unlisted_keys: Collection[str] = (),
) -> Iterator[Fact]:
    """Yield the metrics of a display as facts; energies and times are None without costs.

    Metrics in `unlisted_keys` are for JSON only; `notes` are texts by key.
    """
    notes = notes or {}
    for metric in metrics_at(display, *groups):
        if metric.value_of is None:
            continue
        is_known = has_costs or not metric.needs_costs
        value = metric.value_of(simulation) if is_known else None
        is_listed = display in metric.tables and metric.key not in unlisted_keys
        name, format_value = metric.name if is_listed else None, METRIC_FORMATTERS[metric.unit]
        yield Fact(metric.key, value, name, format_value, notes.get(metric.key, ""))


def report_page_rows(*groups: Group) -> tuple[RowSpec, ...]:
    """Return the `RowSpec` of each metric on a report page; with `groups`, only of these groups."""
    return tuple(
        (metric.key, metric.page_name or metric.name, REPORT_FORMATTERS[metric.unit])
        for metric in metrics_at(Display.PAGE, *groups)
    )


def wear_facts(display: Display, simulation: Simulation) -> Iterator[Fact]:
    """Yield the number of steps until storage is worn out, if `display` contains this metric."""
    note = _wear_note(simulation.written_bytes)
    yield from metric_facts(display, simulation, Group.WEAR, notes={"steps_until_worn": note})


def wear_fact(steps: float | None, written_bytes: int) -> Fact:
    """Return a fact about the steps until storage is worn out, with the bytes written per step.

    `steps` is None if the endurance is unknown, or no block is erased.
    """
    return Fact(
        "steps_until_worn",
        steps,
        "storage worn",
        _format_steps_until_worn,
        _wear_note(written_bytes),
    )


def _wear_note(written_bytes: int) -> str:
    return f"at {format_bytes(written_bytes)} written a step"


def _format_steps_until_worn(steps: float) -> str:
    return f"after {format_count(steps)}steps"


MAX_CONSTRAINTS: Final = 20
"""Maximum number of user-defined constraints of a schedule in a table; JSON contains all."""


def constraint_facts(values: Sequence[ConstraintValue]) -> Iterator[Fact]:
    """Yield the sums of user-defined constraints, with their limits as notes."""
    if not values:
        return
    yield Fact("constraints", [value.to_dict() for value in values])
    shown_values = _select_constraints(values)
    for value in shown_values:
        yield Fact(
            "",
            value.value,
            value.row.name,
            constraint_formatter(value.row),
            _limit_note(value),
            bool(value.violated_side),
        )
    if len(shown_values) < len(values):
        omitted_text = format_items(len(values) - len(shown_values), "constraint")
        n_at_limit = sum(value.at_limit for value in values)
        yield text_fact("", f"and {omitted_text} more", f"{n_at_limit} of all are at a limit")


def constraint_rows(
    values_by_schedule: Sequence[Sequence[ConstraintValue]],
) -> Iterator[tuple[Fact, ...]]:
    """Yield one row per user-defined constraint, with one fact for each schedule."""
    indices_by_name = [
        {value.row.name: index for index, value in enumerate(values)}
        for values in values_by_schedule
    ]
    displayed_names = [
        value.row.name for values in values_by_schedule for value in _select_constraints(values)
    ]
    for name in dict.fromkeys(displayed_names):
        yield tuple(
            _constraint_cell(name, indices.get(name), values)
            for indices, values in zip(indices_by_name, values_by_schedule, strict=True)
        )


def _constraint_cell(name: str, index: int | None, values: Sequence[ConstraintValue]) -> Fact:
    """Return a fact about constraint `values[index]`; without a value if `index` is None."""
    if index is None:
        return Fact("", None, name)
    constraint = values[index]
    format_value = constraint_formatter(constraint.row)
    return Fact(
        f"constraints.{index}.value",
        constraint.value,
        name,
        lambda value: f"{format_value(value)}; {_limit_note(constraint)}",
        alarm=bool(constraint.violated_side),
    )


def _select_constraints(values: Sequence[ConstraintValue]) -> Sequence[ConstraintValue]:
    """Return at most `MAX_CONSTRAINTS` constraints, those at or beyond a limit first."""
    if len(values) <= MAX_CONSTRAINTS:
        return values
    return sorted(values, key=lambda value: not (value.at_limit or value.violated_side))[
        :MAX_CONSTRAINTS
    ]


def _limit_note(value: ConstraintValue) -> str:
    limits_text = value.row.describe_limits(constraint_formatter(value.row))
    if value.violated_side:
        return f"{value.violated_side} its limit: {limits_text}"
    is_range = value.row.lower != value.row.upper
    return f"at its limit: {limits_text}" if value.at_limit and is_range else limits_text


def constraint_formatter(row: Constraint) -> ValueFormatter:
    """Return the format function for the sum of a user-defined constraint."""
    formatters = {"bytes": format_exact_bytes, "s": format_seconds, "J": format_precise_joules}
    return formatters.get(unit_of_terms(row.terms.items()), format_number)


RowSpec = tuple[str, str, ValueFormatter]
"""Path of a value in JSON, its name on a page, and its format function."""
Sections = list[tuple[str, list[tuple[Fact, ...]]]]
"""Titles of sections with their rows; a row has one fact for each of several JSON objects."""


def compare_objects(
    row_specs: Mapping[str, Sequence[RowSpec]], objects: Sequence[Mapping[str, Any]]
) -> Sections:
    """Return the facts of several JSON objects in rows, without empty rows and sections."""
    known_sections: Sections = []
    for title, specs in row_specs.items():
        rows = [
            tuple(Fact(key, value_at_path(entry, key), name, format_value) for entry in objects)
            for key, name, format_value in specs
        ]
        known_rows = [row for row in rows if any(fact.value is not None for fact in row)]
        if known_rows:
            known_sections.append((title, known_rows))
    return known_sections


def value_at_path(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of keys and list indices; None if a key is missing."""
    value: Any = values
    for key in path.split("."):
        if value is None:
            return None
        value = value[int(key)] if isinstance(value, list) else value.get(key)
    return value


# -- formats -----------------------------------------------------------------------------------


def escape_controls(text: str) -> str:
    """Replace characters that are not printable by escapes: a name cannot control a terminal."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def format_count(value: float | None) -> str:
    """Format a count with a metric prefix, ready for a unit: ``11.69 M``, ``512 ``."""
    if value is None:
        return "unknown"
    for letter, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {letter}"
    return f"{value:.4g} "


def format_device_quantity(value: float, *, unit: str) -> str:
    """Format a device quantity for display: watts, writes and times without metric prefix."""
    if unit == "B":
        return format_exact_bytes(value)
    if unit == "s":
        return format_seconds(value)
    text_by_unit = {"W": f"{value:.4g} W", "writes": f"{format_number(value)} writes"}
    text_by_unit["times"] = f"{value:.4g} times"
    return text_by_unit.get(unit) or f"{format_count(value)}{unit}"


def format_percent(ratio: float, *, digits: int = 5, decimals: int = 5) -> str:
    """Format a ratio as a percentage: ``12.5 %``."""
    return f"{round(100 * ratio, decimals):.{digits}g} %"


def format_ratio(ratio: float) -> str:
    """Format a ratio as a percentage with at most four digits: ``0.3329 %``."""
    return format_percent(ratio, digits=4, decimals=6)


def format_number(value: float) -> str:
    """Format a number with up to 12 significant digits: ``12,345``."""
    return f"{value:,.12g}"


def format_yes_no(value: object) -> str:
    """Format a truth value: ``yes`` or ``no``."""
    return "yes" if value else "no"


def format_items(count: int, noun: str) -> str:
    """Format a number of items: ``12 tensors``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_exact_bytes(size: float) -> str:
    """Format a size in bytes, and from 1 KiB also rounded: ``1,536 B (1.50 KiB)``."""
    rounded_text = format_bytes(size)
    exact_text = f"{size:,.0f} B"
    return exact_text if rounded_text == exact_text else f"{exact_text} ({rounded_text})"


def format_precise_joules(energy_j: float) -> str:
    """Format an energy [J] with seven digits, so that close bounds are distinguishable."""
    for prefix, factor in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if abs(energy_j) >= factor:
            return f"{energy_j / factor:,.7g} {prefix}J"
    return f"{energy_j:.7g} J"


METRIC_FORMATTERS: Final[Mapping[MetricUnit, ValueFormatter]] = {
    MetricUnit.BYTES: format_bytes,
    MetricUnit.SECONDS: format_seconds,
    MetricUnit.JOULES: format_joules,
    MetricUnit.FRACTION: format_percent,
    MetricUnit.STEPS: _format_steps_until_worn,
    MetricUnit.COUNT: format_number,
}
"""Format functions of metrics in tables, by unit."""
REPORT_FORMATTERS: Final[Mapping[MetricUnit, ValueFormatter]] = {
    **METRIC_FORMATTERS,
    MetricUnit.BYTES: format_exact_bytes,
    MetricUnit.JOULES: format_precise_joules,
    MetricUnit.STEPS: format_number,
}
"""Format functions of metrics on report pages, with more digits than in tables."""
