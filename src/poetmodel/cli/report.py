"""``poetmodel report``: write one self-contained HTML page about schedules."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.case.checked_plan import CheckedPlan, blocking_warnings
from poetmodel.cli import options
from poetmodel.cli.failures import print_device_ram_warnings, print_warnings
from poetmodel.cli.inputs import (
    NamedGraph,
    check_outputs,
    read_graph_by_name,
    resolve_graph,
    verify_document,
)
from poetmodel.cli.output import fact_table, live_line, print_json, print_written, show
from poetmodel.errors import InputError, PlanError, ScheduleError
from poetmodel.problem import Limits
from poetmodel.report.presenter import Fact, text_fact
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.report.subject import Subject, VerifiedSchedule

LABELS: Final = "ABCDEFGH"
"""Labels of schedules on a page, in order."""


@options.group
class PageOptions:
    """The schedules, and the page about them."""

    schedules: list[Path] = options.argument(
        options.REQUIRED,
        "SCHEDULE...",
        "Schedule files, *.schedule.json, of one graph, shown side by side.",
    )
    out: Path = options.output_option(options.REQUIRED, "--out FILE", "The page, *.html.")


@options.command("poetmodel report mlp.json --graph mlp --out report.html")
def report(
    page_options: PageOptions,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    output: options.OutputOptions,
) -> None:
    """Write an HTML page with verdict, charts and decisions of schedules, usable offline."""
    from poetmodel.report.page import check_report, report_facts, write_report

    paths = page_options.schedules
    if len(paths) > len(LABELS):
        raise InputError(f"SCHEDULE: expected at most {len(LABELS)} files, got {len(paths)}")
    check_report(page_options.out)
    inputs = (*map(str, paths), source.graph, costing.device, costing.profile)
    check_outputs(("--out", page_options.out), inputs=inputs)
    with live_line(enabled=not output.json, activity="verifying"):
        subjects = read_subjects(paths, source, costing)
    print_warnings(dict.fromkeys(note for subject in subjects for note in subject.notes))
    print_device_ram_warnings(*(subject.device_ram for subject in subjects))
    with live_line(enabled=not output.json, activity="drawing"):
        size_bytes = write_report(page_options.out, subjects)
    print_written(page_options.out)
    facts = report_facts(subjects)
    if output.json:
        print_json({"out": str(page_options.out), "size_bytes": size_bytes, **facts})
        return
    title = f"Report on {subjects[0].graph.name}, {format_bytes(size_bytes)}"
    show(fact_table(title, _answer_facts(facts)))


def _answer_facts(report_values: dict[str, Any]) -> Iterator[Fact]:
    from poetmodel.report.wording import schedule_answers

    for entry in report_values["schedules"]:
        for answer in schedule_answers(entry):
            yield text_fact(f"{entry['label']}: {answer.question}", answer.word, answer.text)


def read_subjects(
    paths: Sequence[Path], source: options.FileGraphOptions, costing: options.CostOptions
) -> list[Subject]:
    """Read and verify schedule files of one graph; return them with plans and labels.

    Files beyond the number of `LABELS` are ignored.
    """
    from poetmodel.schedule.document import load_document

    if source.graph is not None:
        graph = read_graph_by_name(source.graph, source.variant)
        named_graph = NamedGraph(graph=graph, name=source.graph, shape=source.variant)
    else:
        first_document = load_document(paths[0])
        named_graph = resolve_graph(source, first_document.schedule.identity, source=paths[0])
    labelled_paths = zip(LABELS, paths, strict=False)
    return [
        _read_subject(path, named_graph, costing, label=label) for label, path in labelled_paths
    ]


def _read_subject(
    path: Path, named_graph: NamedGraph, costing: options.CostOptions, *, label: str
) -> Subject:
    """Read and verify a schedule file, and plan its schedule; return it even with violations."""
    from poetmodel.files import read_text
    from poetmodel.report.subject import Sources, Subject, VerifiedSchedule
    from poetmodel.schedule.document import parse_document

    try:
        document = parse_document(read_text(path), source="")
        verified = verify_document(
            document, named_graph.graph, costing, Limits(), options.ConstraintOptions()
        )
        planned, notes = _plan_schedule(verified)
    except ScheduleError as error:
        raise error.with_prefix(str(path)) from None
    verified_values = {
        field.name: getattr(verified, field.name) for field in fields(VerifiedSchedule)
    }
    return Subject(
        **verified_values | {"notes": (*verified.notes, *notes)},
        label=label,
        sources=Sources(
            schedule=str(path),
            graph=named_graph.name,
            shape=named_graph.shape,
            device=costing.device,
            profile=costing.profile,
        ),
        plan=None if planned is None else planned.plan,
        check=None if planned is None else planned.check,
        arena_check=None if planned is None else planned.arena_check,
    )


def _plan_schedule(verified: VerifiedSchedule) -> tuple[CheckedPlan | None, list[str]]:
    if verified.costs is None or verified.simulation.violations:
        return None, []
    problem, budget = verified.problem, verified.budget_bytes
    if verified.document.problem is None:
        problem = replace(problem, aux_bytes=None)  # that of the device
    try:
        planned = CheckedPlan.of_schedule(
            problem,
            verified.document.schedule,
            ram_budget_bytes=budget if budget is None or budget > 0 else None,
        ).with_addresses()
    except PlanError as error:
        return None, [f"there is no plan: {error}"]
    return planned, blocking_warnings(problem)
