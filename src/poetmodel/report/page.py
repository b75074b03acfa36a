"""The report: one self-contained HTML page, made with jinja2 and plotly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import make_gauge
from poetmodel.errors import InputError, quote
from poetmodel.files import write_bytes
from poetmodel.report.charts import (
    address_chart,
    gauge_chart,
    graph_chart,
    map_chart,
)
from poetmodel.report.device_ram import format_gauge
from poetmodel.report.drawing import check_installed
from poetmodel.report.facts import (
    decision_rows,
    graph_facts,
    schedule_facts,
    treatment_names,
)
from poetmodel.report.folding import COSTS, decision_table
from poetmodel.report.table_rows import (
    COLUMNS,
    MAIN_SECTIONS,
    constraint_section,
    graph_rows,
    measured_rows,
    metric_sections,
    step_sections,
)
from poetmodel.report.template import LIBRARIES, render
from poetmodel.report.timeline import timeline_chart
from poetmodel.report.wording import schedule_answers, step_answers
from poetmodel.units import ESTIMATES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.case.opening import Checked


SCRIPTS: Final = ("gauge", "timeline", "addresses", "map")
"""Types of charts; each has a script of this name."""

PAGE_SUFFIXES: Final = (".html", ".htm")
"""Suffixes of a report's file."""


def check_report(path: str | Path) -> None:
    """Raise `InputError` unless a page has this suffix, `MissingExtraError` without libraries."""
    suffix = Path(path).suffix.lower()
    if suffix not in PAGE_SUFFIXES:
        raise InputError(
            f"{path}: a report is a page; expected a name that ends in "
            f"{' or '.join(PAGE_SUFFIXES)}, got {quote(suffix)}"
        )
    check_installed(path, "a report", *LIBRARIES)


def report_facts(subjects: Sequence[Checked]) -> dict[str, Any]:
    """Return all facts of a report on schedules of one graph as JSON values."""
    return {
        "graph": graph_facts(subjects[0]),
        "schedules": [schedule_facts(subject) for subject in subjects],
    }


def report_page(subjects: Sequence[Checked]) -> str:
    """Return a report as the text of an HTML file; equal input gives equal text.

    The page loads no other file, which its content security policy enforces.
    """
    facts = report_facts(subjects)
    has_several_schedules = len(subjects) > 1
    sections = metric_sections(facts["schedules"])
    charts = _charts(subjects)
    return render(
        "report.html.jinja",
        chart_scripts=SCRIPTS,
        charts={"graph": graph_chart(subjects[0].graph), "charts": charts},
        chart_ids={chart["id"] for chart in charts},
        title=_title(subjects),
        several=has_several_schedules,
        estimates=_estimates_note(subjects),
        graph=facts["graph"],
        schedules=facts["schedules"],
        answers=[schedule_answers(entry) for entry in facts["schedules"]],
        sections=[section for section in sections if section[0] in MAIN_SECTIONS]
        + constraint_section([subject.constraints for subject in subjects]),
        fact_sections=[section for section in sections if section[0] not in MAIN_SECTIONS],
        graph_rows=list(
            graph_rows(facts["graph"], includes_reserved=bool(subjects[0].reserved_bytes))
        ),
        steps=[_step_section(entry) for entry in facts["schedules"] if entry["step"] is not None],
        step_sections=step_sections(facts["schedules"]),
        step_columns=COLUMNS,
        decisions=_decisions(subjects),
        choices=treatment_names(subjects[0].graph),
        gauges=list(_gauge_texts(subjects)),
        has_plan=[subject.planned is not None for subject in subjects],
        arena_checks=[
            None if subject.planned is None else subject.planned.arena_check for subject in subjects
        ],
    )


def write_report(path: str | Path, subjects: Sequence[Checked]) -> int:
    """Write a report atomically; return its size [B]."""
    check_report(path)
    content = report_page(subjects).encode("utf-8", "replace")
    write_bytes(path, content)
    return len(content)


def _estimates_note(subjects: Sequence[Checked]) -> str:
    """Return the note that energies are estimates; empty without energies."""
    has_energies = any(
        subject.costs is not None and subject.problem.uses_energy for subject in subjects
    )
    return f"{ESTIMATES.capitalize()}." if has_energies else ""


def _decisions(subjects: Sequence[Checked]) -> dict[str, Any]:
    """Return ``heads`` and, for each schedule, (label, rows) of the tables of decisions."""
    has_costs = any(subject.costs is not None for subject in subjects)
    shows_energy = any(subject.problem.uses_energy for subject in subjects)
    costs = [name for name in COSTS if has_costs and (shows_energy or name != "energy")]
    tables = {
        subject.label: decision_table(decision_rows(subject.problem, subject.schedule), costs=costs)
        for subject in subjects
    }
    return {
        "heads": tables[subjects[0].label]["heads"],
        "rows": [(label, table["rows"]) for label, table in tables.items()],
    }


def _step_section(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a compiled step; ``differences`` are those from eager PyTorch."""
    step = schedule["step"]
    return {
        "entry": schedule,
        "answers": step_answers(step),
        "rows": list(measured_rows(step)),
        "differences": [] if step["certificate"] is None else step["certificate"]["differences"],
    }


def _gauge_texts(subjects: Sequence[Checked]) -> Iterator[str]:
    """Yield a text per valid schedule with a device, for readers who cannot see `gauge_chart`."""
    for subject in subjects:
        sizes = make_gauge(subject.device_ram)
        if sizes is not None and subject.verdict.valid:
            free_text, use_text = format_gauge(sizes)
            verdict = "it trains there" if sizes["trains"] else "it does not train there"
            yield f"{subject.label}: {free_text}: {verdict}; {use_text}"


def _title(subjects: Sequence[Checked]) -> str:
    """Return the title of a page: the graph, and the devices of its schedules, if any."""
    device_names = dict.fromkeys(
        device.name for subject in subjects if (device := subject.problem.costs.device) is not None
    )
    name = subjects[0].graph.name
    # Metrics of a compiled step are measured on the host, not on the device.
    preposition = "on" if all(subject.step is None for subject in subjects) else "planned for"
    return f"{name} {preposition} {', '.join(device_names)}" if device_names else name


def _charts(subjects: Sequence[Checked]) -> list[dict[str, Any]]:
    """Return the data of all charts, each with ``type`` and ``id``, in the order of the page."""
    gauge_data = gauge_chart(subjects)
    return [
        *([] if gauge_data is None else [{"type": "gauge", "id": "gauge", **gauge_data}]),
        *(
            {"type": "timeline", "id": f"time-{subject.label}", **chart}
            for subject in subjects
            if (chart := timeline_chart(subject)) is not None
        ),
        *(
            {"type": "addresses", "id": f"addresses-{subject.label}", **chart}
            for subject in subjects
            if (chart := address_chart(subject)) is not None
        ),
        *(
            {
                "type": "map",
                "id": f"map-{subject.label}",
                **map_chart(subject.graph, subject.schedule),
            }
            for subject in subjects
        ),
    ]
