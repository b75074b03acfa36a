"""The report: one self-contained HTML page, made with jinja2 and plotly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import format_gauge, make_gauge
from poetmodel.files import write_bytes
from poetmodel.report.charts import (
    address_chart,
    gauge_chart,
    graph_chart,
    map_chart,
)
from poetmodel.report.drawing import check_installed
from poetmodel.report.facts import choice_names, decision_rows, facts, graph_facts
from poetmodel.report.figures import (
    COLUMNS,
    FIRST_PARTS,
    constraint_part,
    figures,
    graph_rows,
    measured_rows,
    step_figures,
)
from poetmodel.report.folding import COSTS, decision_table
from poetmodel.report.template import LIBRARIES, render
from poetmodel.report.timeline import timeline_chart
from poetmodel.report.wording import answers, step_answers
from poetmodel.units import ESTIMATES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.report.subject import Subject


SCRIPTS: Final = (*("gauge", "timeline", "addresses", "map"),)
"""Types of charts; each has a script of this name."""


def check_report(path: str | Path) -> None:
    """Raise `MissingExtraError` unless the libraries of a report are installed."""
    check_installed(path, "a report", *LIBRARIES)


def report_facts(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return all facts of a report on schedules of one graph as plain values."""
    return {
        "graph": graph_facts(subjects[0]),
        "schedules": [facts(subject) for subject in subjects],
    }


def report_page(subjects: Sequence[Subject]) -> str:
    """Return a report as the text of an HTML file; equal input gives equal text.

    The page loads nothing else, which its content security policy enforces. The schedules are shown
    side by side in the given order.
    """
    facts = report_facts(subjects)
    several = len(subjects) > 1
    parts = figures(facts["schedules"])
    charts = _charts(subjects)
    return render(
        "report.html.jinja",
        chart_scripts=SCRIPTS,
        charts={"graph": graph_chart(subjects[0].graph), "charts": charts},
        drawn={chart["id"] for chart in charts},
        title=_title(subjects),
        several=several,
        estimates=_estimates_note(subjects),
        graph=facts["graph"],
        schedules=facts["schedules"],
        answers=[answers(entry) for entry in facts["schedules"]],
        parts=[part for part in parts if part[0] in FIRST_PARTS]
        + constraint_part([subject.constraints for subject in subjects]),
        fact_parts=[part for part in parts if part[0] not in FIRST_PARTS],
        graph_rows=list(graph_rows(facts["graph"], reserved=bool(subjects[0].reserved_bytes))),
        steps=[_step_section(entry) for entry in facts["schedules"] if entry["step"] is not None],
        step_parts=step_figures(facts["schedules"]),
        step_columns=COLUMNS,
        decisions=_decisions(subjects),
        choices=choice_names(subjects[0].graph),
        gauges=list(_gauge_texts(subjects)),
        has_plan=[subject.plan is not None for subject in subjects],
        places=[subject.arena_check for subject in subjects],
    )


def write_report(path: str | Path, subjects: Sequence[Subject]) -> int:
    """Write a report atomically; return its size [B]."""
    check_report(path)
    content = report_page(subjects).encode("utf-8", "replace")
    write_bytes(path, content)
    return len(content)


def _estimates_note(subjects: Sequence[Subject]) -> str:
    """Return the note that energies are estimates; empty without energies."""
    has_energies = any(s.costs is not None and s.problem.uses_energy for s in subjects)
    return f"{ESTIMATES.capitalize()}." if has_energies else ""


def _decisions(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return the tables of decisions: column heads, and the rows of each schedule by its label."""
    has_costs = any(subject.costs is not None for subject in subjects)
    shows_energy = any(subject.problem.uses_energy for subject in subjects)
    costs = [name for name in COSTS if has_costs and (shows_energy or name != "energy")]
    tables = {
        s.label: decision_table(decision_rows(s.problem, s.schedule), costs=costs) for s in subjects
    }
    return {
        "heads": tables[subjects[0].label]["heads"],
        "rows": [(label, table["rows"]) for label, table in tables.items()],
    }


def _step_section(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template values of the section about the compiled step of a schedule."""
    step = entry["step"]
    return {
        "entry": entry,
        "answers": step_answers(step),
        "rows": list(measured_rows(step)),
        "differences": [] if step["certificate"] is None else step["certificate"]["differences"],
    }


def _gauge_texts(subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield the RAM gauge of each schedule as text, for readers without scripts."""
    for subject in subjects:
        sizes = make_gauge(subject.room)
        if sizes is not None:
            rest, parts = format_gauge(sizes)
            verdict = "it trains there" if sizes["trains"] else "it does not train there"
            yield f"{subject.label}: {rest}: {verdict}; {parts}"


def _title(subjects: Sequence[Subject]) -> str:
    """Return the title of the page: the graph, and the devices of the schedules."""
    device_names = dict.fromkeys(
        device.name for subject in subjects if (device := subject.problem.costs.device) is not None
    )
    name = subjects[0].graph.name
    # Metrics of a compiled step are measured on the host, not on the device.
    preposition = "on" if all(subject.step is None for subject in subjects) else "planned for"
    return f"{name} {preposition} {', '.join(device_names)}" if device_names else name


def _charts(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return the data of all charts, each with its id on the page."""
    gauge = gauge_chart(subjects)
    return [
        *([] if gauge is None else [{"type": "gauge", "id": "gauge", **gauge}]),
        *(
            {"type": "timeline", "id": f"time-{s.label}", **chart}
            for s in subjects
            if (chart := timeline_chart(s)) is not None
        ),
        *(
            {"type": "addresses", "id": f"addresses-{s.label}", **chart}
            for s in subjects
            if (chart := address_chart(s)) is not None
        ),
        *(
            {"type": "map", "id": f"map-{s.label}", **map_chart(s.graph, s.schedule)}
            for s in subjects
        ),
    ]
