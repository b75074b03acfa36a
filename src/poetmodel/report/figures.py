"""Rows of the tables of a report: names, units and JSON paths of the facts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.hardware import device_quantities
from poetmodel.problem.totals import format_terms
from poetmodel.report.presenter import (
    Fact,
    Parts,
    Row,
    Unit,
    compare_objects,
    constraint_rows,
    format_device_quantity,
    format_number,
    format_ratio,
    page_rows,
    plural,
    text_fact,
    value_at_path,
    whole_bytes,
    yes_or_no,
)
from poetmodel.schedule.metrics import Group
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.schedule import ConstraintValue

    Facts = Mapping[str, Any]


def figures(schedules: Sequence[Facts]) -> Parts:
    """Return the rows of the metrics of schedules, in named parts.

    Energies are omitted unless requested. The RAM for tensors is omitted if it equals the budget.
    """
    return compare_objects(
        _schedule_rows(), [{**schedule, **_omitted_rows(schedule)} for schedule in schedules]
    )


def _omitted_rows(schedule: Facts) -> dict[str, None]:
    shows_energy = bool(schedule["asks_energy"])
    names = [] if shows_energy else [key for key, *_ in page_rows(Group.ENERGY, Group.PROOF)]
    if schedule["budget_bytes"] == value_at_path(schedule, "problem.ram_budget_bytes"):
        names.append("budget_bytes")
    return dict.fromkeys(names)


def constraint_part(several: Sequence[Sequence[ConstraintValue]]) -> Parts:
    """Return the rows of user-defined constraints of schedules as one part, or no part."""
    lines = list(constraint_rows(several))
    return [("User-defined constraints", lines)] if lines else []


def step_figures(schedules: Sequence[Facts]) -> Parts:
    """Return the rows of the metrics of compiled steps in named parts, without measured metrics."""
    return compare_objects(_step_rows(), schedules)


def measured_rows(step: Facts) -> Iterator[tuple[Fact, ...]]:
    """Yield rows of measured metrics of a step, with one fact for each of `COLUMNS`."""
    for name, format_value, keys in _MEASURED:
        yield tuple(
            Fact(f"step.{key}", value_at_path(step, key), name, format_value)
            if key
            else Fact("", None, name)
            for key in keys
        )


def graph_rows(graph: Facts, *, reserved: bool) -> Iterator[Fact]:
    """Yield the facts about the graph; `reserved` is whether RAM values include reserved bytes."""
    yield text_fact("network", graph["name"])
    yield text_fact("nodes", f"{graph['nodes']:,}")
    yield text_fact("tensors", f"{graph['tensors']:,}")
    yield text_fact("edges", f"{graph['edges']:,}")
    yield text_fact("FLOP of a step", f"{graph['flops']:,}")
    yield text_fact("batch size, type", f"{graph['batch_size']:,}, {graph['dtype']}")
    yield text_fact("keep-all peak", whole_bytes(graph["checkpoint_all_peak_bytes"]))
    floor = whole_bytes(graph["floor_bytes"])
    floor_name = "minimum RAM, with reserved bytes" if reserved else "minimum RAM"
    yield text_fact(floor_name, f"{floor}, needed by {graph['floor_node']}")
    if "state" in graph:
        tensors = plural(graph["state"]["tensors"], "tensor")
        yield text_fact("state", f"{whole_bytes(graph['state']['bytes'])}, {tensors}")
    for kind, size in graph["resident_bytes"].items():
        yield text_fact(f"resident: {kind}", whole_bytes(size))
    yield text_fact("sha256", graph["sha256"])


def _options(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _weights(weights: Mapping[str, float]) -> str:
    return format_terms(tuple(weights.items()))


_SHOWN_GAPS: Final = (0.5, 0.1, 0.01, 0.001, 0.0001, 0.0)
"""Gaps whose times a page shows."""


def _gap_over_time(moments: Sequence[Sequence[float]]) -> str:
    """Return when the gap first reached each of `_SHOWN_GAPS`: ``10 % in 12 ms, 0 % in 80 ms``."""
    texts: dict[float, str] = {}
    for limit in _SHOWN_GAPS:
        reached = next(((seconds, gap) for seconds, gap in moments if gap <= limit), None)
        if reached is not None:
            texts[reached[0]] = f"{format_ratio(limit)} in {format_seconds(reached[0])}"
    return ", ".join(texts.values()) or f"above {format_ratio(_SHOWN_GAPS[0])}"


FIRST_PARTS: Final = ("Verdict", "Certificate", "Memory", "Time", "Decisions")
"""Parts in the main table; the other parts are in the table of facts."""

_STATUS: Final = ("status", "status in the file", str)
_GAPS: Final = (
    ("gap", "gap of the minimized quantity", format_ratio),
    ("requested_gap", "gap tolerance", format_ratio),
    ("gap_over_time", "gap over time", _gap_over_time),
)


def _schedule_rows() -> dict[str, tuple[Row, ...]]:
    """Return the rows about a schedule, by part."""
    return {
        "Verdict": (
            ("valid", "valid, as verified", yes_or_no),
            _STATUS,
            *page_rows(Group.ENERGY),
        ),
        "Certificate": (
            *page_rows(Group.PROOF),
            ("objective.minimize", "minimized", str),
            *_GAPS,
            ("problem.weights", "user-defined objective", _weights),
            ("problem.method", "method", str),
            ("problem.formulation", "formulation", str),
            ("problem.backend", "back end", str),
            ("problem.solver_options", "options of the back end", _options),
            *page_rows(Group.EFFORT),
        ),
        "Memory": (
            *page_rows(Group.MEMORY),
            ("budget_bytes", "RAM budget less resident bytes", whole_bytes),
            ("problem.ram_budget_bytes", "RAM budget", whole_bytes),
            ("resident_bytes", "resident bytes, on top of the peak", whole_bytes),
            ("device_ram_bytes", "RAM of the device", whole_bytes),
            ("fits_device", "fits the device", yes_or_no),
            ("device_ram.state_bytes", "in use at the peak: state", whole_bytes),
            ("device_ram.activation_bytes", "activations", whole_bytes),
            ("device_ram.gradient_bytes", "gradients", whole_bytes),
            ("device_ram.workspace_bytes", "workspace", whole_bytes),
            ("state.resident_bytes", "resident state", whole_bytes),
            ("state.on_storage_bytes", "state on storage", whole_bytes),
            ("state.written_back_bytes", "state written back a step", whole_bytes),
            ("in_place.saved_at_peak_bytes", "saved in place at the peak", whole_bytes),
            *page_rows(Group.STORAGE, Group.WEAR),
        ),
        "Time": (
            *page_rows(Group.WORK, Group.STEP),
            ("pass_s", "time of a single pass", format_seconds),
            ("problem.deadline_s", "deadline", format_seconds),
            ("problem.deadline_counts", "time that the deadline limits", str),
            ("plan.mode", "transfers of the plan", str),
            ("plan.stall_s", "stall of the plan", format_seconds),
            ("plan.makespan_s", "makespan of the plan", format_seconds),
            ("plan.peak_ram_bytes", "peak RAM of the plan", whole_bytes),
        ),
        "Decisions": (
            ("decisions.recomputations", "recomputations", format_number),
            ("decisions.page_outs", "page-outs", format_number),
            ("decisions.page_ins", "page-ins", format_number),
        ),
        "Limits": (
            ("problem.recompute", "recomputation allowed", yes_or_no),
            ("problem.paging", "paging allowed", yes_or_no),
            ("problem.energy_budget_j", "energy budget", format_joules),
            ("problem.aux_bytes", "storage limit", whole_bytes),
            ("problem.count_parameters", "parameters count in the budget", yes_or_no),
            ("problem.commit", "steps from commit to commit", format_number),
        ),
        "Device": (
            ("device.name", "device", str),
            ("device.core", "core", str),
            ("device.costs", "costs from", str),
            ("device.cycles", "compute times", str),
            *(
                (
                    f"device.{path}",
                    quantity.name,
                    partial(format_device_quantity, unit=quantity.unit),
                )
                for path, quantity in device_quantities()
            ),
            ("device.storage.mode", "transfers", str),
        ),
    }


COLUMNS: Final = ("measured", "plan", "eager")
"""Metrics measured for the step, those of its plan, and those measured for eager PyTorch."""

_MEASURED: Final[tuple[tuple[str, Unit, tuple[str | None, str | None, str | None]], ...]] = (
    (
        "peak RAM",
        format_bytes,
        ("certificate.heap_peak_bytes", "plan.peak_bytes", "certificate.eager_heap_peak_bytes"),
    ),
    ("paged out", format_bytes, ("certificate.written_bytes", "plan.written_bytes", None)),
    ("paged in", format_bytes, ("certificate.read_bytes", "plan.read_bytes", None)),
    (
        "time of a step",
        format_seconds,
        ("certificate.time_s", "plan.makespan_s", "certificate.eager_time_s"),
    ),
)


def _step_rows() -> dict[str, tuple[Row, ...]]:
    """Return the rows about a compiled step, by part."""
    return {
        "Memory of the step": (
            ("step.budget_bytes", "RAM budget", whole_bytes),
            ("step.keep_all_bytes", "keep-all peak", whole_bytes),
            ("step.plan.peak_bytes", "peak RAM of the plan", whole_bytes),
            ("step.reserved_bytes", "of which reserved", whole_bytes),
            (
                "step.certificate.second_gradients_bytes",
                "more while gradients accumulate (rollback)",
                whole_bytes,
            ),
            ("step.certificate.state_on_storage_bytes", "state on storage", whole_bytes),
            (
                "step.certificate.mirrored_bytes",
                "copies of state in RAM that a step writes (rollback)",
                whole_bytes,
            ),
            (
                "step.graph.resident_bytes.parameters",
                "in addition: parameters, buffers",
                whole_bytes,
            ),
            ("step.graph.resident_bytes.gradients", "in addition: gradients", whole_bytes),
        ),
        "What was captured": (
            ("step.graph.batch_size", "batch size", format_number),
            ("step.graph.nodes", "operations as captured", format_number),
            ("step.graph.tensors", "tensors as captured", format_number),
            ("step.graph.scheduled_tensors", "tensors with decisions of the solver", format_number),
            ("step.graph.threshold_bytes", "always kept: tensors below", whole_bytes),
        ),
        "What runs": (
            ("step.plan.instructions", "instructions", format_number),
            ("step.plan.recomputed", "recomputations", format_number),
            ("step.plan.mode", "transfers of the plan", str),
            ("step.plan.stall_s", "stall of the plan", format_seconds),
        ),
        "Solve": (
            _STATUS,
            *_GAPS,
            *page_rows(Group.EFFORT),
            ("step.compile_s", "time of compile in all", format_seconds),
        ),
    }
