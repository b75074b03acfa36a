"""Rows of the tables of a report: names, formats and JSON paths of the facts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.hardware import device_quantities
from poetmodel.problem.totals import format_terms
from poetmodel.report.presenter import (
    Fact,
    RowSpec,
    Sections,
    ValueFormatter,
    compare_objects,
    constraint_rows,
    format_device_quantity,
    format_exact_bytes,
    format_items,
    format_number,
    format_ratio,
    format_yes_no,
    report_page_rows,
    text_fact,
    value_at_path,
)
from poetmodel.schedule.metrics import Group
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.schedule import ConstraintValue

    Facts = Mapping[str, Any]


def metric_sections(schedules: Sequence[Facts]) -> Sections:
    """Return the rows of metrics that have values, in sections with titles."""
    return compare_objects(
        _schedule_rows(), [{**schedule, **_omitted_metrics(schedule)} for schedule in schedules]
    )


def _omitted_metrics(schedule: Facts) -> dict[str, None]:
    """Return None for each metric of a schedule that `metric_sections` omits, by key."""
    shows_energy = bool(schedule["asks_energy"])
    keys = [] if shows_energy else [key for key, *_ in report_page_rows(Group.ENERGY, Group.PROOF)]
    if schedule["budget_bytes"] == value_at_path(schedule, "problem.ram_budget_bytes"):
        keys.append("budget_bytes")
    return dict.fromkeys(keys)


def constraint_section(values_by_schedule: Sequence[Sequence[ConstraintValue]]) -> Sections:
    """Return the rows of user-defined constraints of schedules as one section; [] without any."""
    rows = list(constraint_rows(values_by_schedule))
    return [("User-defined constraints", rows)] if rows else []


def step_sections(schedules: Sequence[Facts]) -> Sections:
    """Return the rows of compiled steps in sections, without those of `measured_rows`."""
    return compare_objects(_step_rows(), schedules)


def measured_rows(step: Facts) -> Iterator[tuple[Fact, ...]]:
    """Yield the rows peak RAM, paged out, paged in and time, a fact for each of `COLUMNS`."""
    for name, format_value, keys in _MEASURED_ROWS:
        yield tuple(
            Fact(f"step.{key}", value_at_path(step, key), name, format_value)
            if key
            else Fact("", None, name)
            for key in keys
        )


def graph_rows(graph: Facts, *, includes_reserved: bool) -> Iterator[Fact]:
    """Yield facts about the graph as texts; `includes_reserved` is noted at the minimum RAM."""
    yield text_fact("network", graph["name"])
    yield text_fact("nodes", f"{graph['nodes']:,}")
    yield text_fact("tensors", f"{graph['tensors']:,}")
    yield text_fact("edges", f"{graph['edges']:,}")
    yield text_fact("FLOP of a step", f"{graph['flops']:,}")
    yield text_fact("batch size, type", f"{graph['batch_size']:,}, {graph['dtype']}")
    yield text_fact("keep-all peak", format_exact_bytes(graph["checkpoint_all_peak_bytes"]))
    minimum_text = format_exact_bytes(graph["floor_bytes"])
    minimum_name = "minimum RAM, with reserved bytes" if includes_reserved else "minimum RAM"
    yield text_fact(minimum_name, f"{minimum_text}, needed by {graph['floor_node']}")
    if "state" in graph:
        tensors_text = format_items(graph["state"]["tensors"], "tensor")
        yield text_fact("state", f"{format_exact_bytes(graph['state']['bytes'])}, {tensors_text}")
    for kind, size in graph["resident_bytes"].items():
        yield text_fact(f"resident: {kind}", format_exact_bytes(size))
    yield text_fact("sha256", graph["sha256"])


def _options_text(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _weights_text(weights: Mapping[str, float]) -> str:
    return format_terms(tuple(weights.items()))


_DISPLAYED_GAPS: Final = (0.5, 0.1, 0.01, 0.001, 0.0001, 0.0)
"""Gaps for which a page states the time until the solve first reached them."""


def _gap_over_time_text(history: Sequence[Sequence[float]]) -> str:
    """Format when (time [s], gap) pairs first reach some gaps: ``10 % in 12 ms, 0 % in 80 ms``."""
    texts: dict[float, str] = {}
    for gap_limit in _DISPLAYED_GAPS:
        first_reached = next(((seconds, gap) for seconds, gap in history if gap <= gap_limit), None)
        if first_reached is not None:
            texts[first_reached[0]] = (
                f"{format_ratio(gap_limit)} in {format_seconds(first_reached[0])}"
            )
    return ", ".join(texts.values()) or f"above {format_ratio(_DISPLAYED_GAPS[0])}"


MAIN_SECTIONS: Final = ("Verdict", "Certificate", "Memory", "Time", "Decisions")
"""Sections of metrics in the main table; the other sections are in the table of facts."""

_STATUS: Final = ("status", "status in the file", str)
_GAPS: Final = (
    ("gap", "gap of the minimized quantity", format_ratio),
    ("requested_gap", "gap tolerance", format_ratio),
    ("gap_over_time", "gap over time", _gap_over_time_text),
)


def _schedule_rows() -> dict[str, tuple[RowSpec, ...]]:
    """Return the `RowSpec` of each row about a schedule, by section: verdict first, device last."""
    return {
        "Verdict": (
            ("valid", "valid, as verified", format_yes_no),
            _STATUS,
            *report_page_rows(Group.ENERGY),
        ),
        "Certificate": (
            *report_page_rows(Group.PROOF),
            ("objective.minimize", "minimized", str),
            *_GAPS,
            ("problem.weights", "user-defined objective", _weights_text),
            ("problem.method", "method", str),
            ("problem.formulation", "formulation", str),
            ("problem.backend", "back end", str),
            ("problem.solver_options", "options of the back end", _options_text),
            *report_page_rows(Group.EFFORT),
        ),
        "Memory": (
            *report_page_rows(Group.MEMORY),
            ("budget_bytes", "RAM budget less resident bytes", format_exact_bytes),
            ("problem.ram_budget_bytes", "RAM budget", format_exact_bytes),
            ("resident_bytes", "resident bytes, in addition to the peak", format_exact_bytes),
            ("device_ram_bytes", "RAM of the device", format_exact_bytes),
            ("fits_device", "fits the device", format_yes_no),
            ("device_ram.state_bytes", "in use at the peak: state", format_exact_bytes),
            ("device_ram.activation_bytes", "activations", format_exact_bytes),
            ("device_ram.gradient_bytes", "gradients", format_exact_bytes),
            ("device_ram.workspace_bytes", "workspace", format_exact_bytes),
            ("state.resident_bytes", "resident state", format_exact_bytes),
            ("state.on_storage_bytes", "state on storage", format_exact_bytes),
            ("state.written_back_bytes", "state written back a step", format_exact_bytes),
            ("in_place.saved_at_peak_bytes", "saved in place at the peak", format_exact_bytes),
            *report_page_rows(Group.STORAGE, Group.WEAR),
        ),
        "Time": (
            *report_page_rows(Group.WORK, Group.STEP),
            ("pass_s", "time of a single pass", format_seconds),
            ("problem.deadline_s", "deadline", format_seconds),
            ("problem.deadline_counts", "time that the deadline limits", str),
            ("plan.mode", "transfers of the plan", str),
            ("plan.stall_s", "stall of the plan", format_seconds),
            ("plan.makespan_s", "makespan of the plan", format_seconds),
            ("plan.peak_ram_bytes", "peak RAM of the plan", format_exact_bytes),
        ),
        "Decisions": (
            ("decisions.recomputations", "recomputations", format_number),
            ("decisions.page_outs", "page-outs", format_number),
            ("decisions.page_ins", "page-ins", format_number),
        ),
        "Limits": (
            ("problem.recompute", "recomputation allowed", format_yes_no),
            ("problem.paging", "paging allowed", format_yes_no),
            ("problem.energy_budget_j", "energy budget", format_joules),
            ("problem.aux_bytes", "storage limit", format_exact_bytes),
            ("problem.count_parameters", "parameters count in the budget", format_yes_no),
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
"""Columns of a table: metrics measured for a step, of its plan, and measured for eager PyTorch."""

_MEASURED_ROWS: Final[
    tuple[tuple[str, ValueFormatter, tuple[str | None, str | None, str | None]], ...]
] = (
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
"""Name, format function, and one path for each of `COLUMNS` (None for no metric), of each row."""


def _step_rows() -> dict[str, tuple[RowSpec, ...]]:
    """Return the `RowSpec` of each row about a compiled step, by the section's title."""
    return {
        "Memory of the step": (
            ("step.budget_bytes", "RAM budget", format_exact_bytes),
            ("step.keep_all_bytes", "keep-all peak", format_exact_bytes),
            ("step.plan.peak_bytes", "peak RAM of the plan", format_exact_bytes),
            ("step.reserved_bytes", "of which reserved", format_exact_bytes),
            (
                "step.certificate.second_gradients_bytes",
                "additional bytes while gradients accumulate (rollback, hooks)",
                format_exact_bytes,
            ),
            ("step.certificate.state_on_storage_bytes", "state on storage", format_exact_bytes),
            (
                "step.certificate.mirrored_bytes",
                "copies of state in RAM that a step writes (rollback)",
                format_exact_bytes,
            ),
            (
                "step.graph.resident_bytes.parameters",
                "in addition: parameters, buffers",
                format_exact_bytes,
            ),
            ("step.graph.resident_bytes.gradients", "in addition: gradients", format_exact_bytes),
        ),
        "Captured graph": (
            ("step.graph.batch_size", "batch size", format_number),
            ("step.graph.nodes", "operations as captured", format_number),
            ("step.graph.tensors", "tensors as captured", format_number),
            ("step.graph.scheduled_tensors", "tensors with decisions of the solver", format_number),
        ),
        "Executed code": (
            ("step.plan.instructions", "instructions", format_number),
            ("step.plan.recomputed", "recomputations", format_number),
            ("step.plan.mode", "transfers of the plan", str),
            ("step.plan.stall_s", "stall of the plan", format_seconds),
        ),
        "Solve": (
            _STATUS,
            *_GAPS,
            *report_page_rows(Group.EFFORT),
            ("step.compile_s", "time of compile in all", format_seconds),
        ),
    }
