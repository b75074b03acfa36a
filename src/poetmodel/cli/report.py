"""``poetmodel report``: write one self-contained HTML page about schedules."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import options
from poetmodel.cli.failures import print_room_warnings, print_warnings
from poetmodel.cli.inputs import (
    NamedGraph,
    check_outputs,
    read_named,
    resolve_graph,
    verify_document,
)
from poetmodel.cli.output import fact_table, live_line, print_json, print_written, show
from poetmodel.cli.plan import PlanResult, default_mode
from poetmodel.errors import InputError, PlanError, ScheduleError
from poetmodel.report.presenter import Fact, text_fact
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.report.subject import Subject, VerifiedSchedule

LABELS: Final = "ABCDEFGH"


@options.group
class PageOptions:
    """The page, and its schedules."""

    schedules: list[Path] = options.argument(
        options.REQUIRED,
        "SCHEDULE...",
        "Schedule files, *.schedule.json, of one graph, shown side by side.",
    )
    out: Path = options.output_option(options.REQUIRED, "--out FILE", "The page, *.html.")


@options.command("poetmodel report mlp.json --graph mlp --out report.html")
def report(
    page: PageOptions,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    output: options.OutputOptions,
) -> None:
    """Write an HTML page with verdict, charts and decisions of schedules; it needs no network."""
    from poetmodel.report.page import check_report, report_facts, write_report

    paths = page.schedules
    if len(paths) > len(LABELS):
        raise InputError(f"SCHEDULE: expected at most {len(LABELS)} files, got {len(paths)}")
    check_report(page.out)
    inputs = (*map(str, paths), source.graph, costing.device, costing.profile)
    check_outputs(("--out", page.out), inputs=inputs)
    with live_line(enabled=not output.json, doing="verifying"):
        subjects = read_subjects(paths, source, costing)
    print_warnings(dict.fromkeys(note for subject in subjects for note in subject.notes))
    print_room_warnings(*(subject.room for subject in subjects))
    with live_line(enabled=not output.json, doing="drawing"):
        size_bytes = write_report(page.out, subjects)
    print_written(page.out)
    facts = report_facts(subjects)
    if output.json:
        print_json({"out": str(page.out), "size_bytes": size_bytes, **facts})
        return
    title = f"Report on {subjects[0].graph.name}, {format_bytes(size_bytes)}"
    show(fact_table(title, _answer_facts(facts)))


def _answer_facts(figures: dict[str, Any]) -> Iterator[Fact]:
    """Yield the answers about each schedule."""
    from poetmodel.report.wording import answers

    for entry in figures["schedules"]:
        for answer in answers(entry):
            yield text_fact(f"{entry['label']}: {answer.question}", answer.word, answer.text)


def read_subjects(
    paths: Sequence[Path], source: options.FileGraphOptions, costing: options.CostOptions
) -> list[Subject]:
    """Read and verify schedule files of one graph."""
    from poetmodel.schedule.document import load_document

    if source.graph is not None:
        graph = read_named(source.graph, source.shape)
        named_graph = NamedGraph(graph=graph, name=source.graph, shape=source.shape)
    else:
        first = load_document(paths[0])
        named_graph = resolve_graph(source, first.schedule.identity, source=paths[0])
    labelled = zip(LABELS, paths, strict=False)
    return [_read_subject(path, named_graph, costing, label=label) for label, path in labelled]


def _read_subject(
    path: Path, given: NamedGraph, costing: options.CostOptions, *, label: str
) -> Subject:
    """Read and verify a schedule file, and plan its schedule if it is valid and has costs."""
    from poetmodel.files import read_text
    from poetmodel.report.subject import Sources, Subject, VerifiedSchedule
    from poetmodel.schedule.document import parse_document

    try:
        document = parse_document(read_text(path), source="")
        verified = verify_document(document, given.graph, costing)
        planned, notes = _plan_schedule(verified)
    except ScheduleError as error:
        raise error.with_prefix(str(path)) from None
    of_file = {field.name: getattr(verified, field.name) for field in fields(VerifiedSchedule)}
    return Subject(
        **of_file | {"notes": (*verified.notes, *notes)},
        label=label,
        sources=Sources(
            schedule=str(path),
            graph=given.name,
            shape=given.shape,
            device=costing.device,
            profile=costing.profile,
        ),
        plan=None if planned is None else planned.plan,
        check=None if planned is None else planned.check,
        arena_check=None if planned is None else planned.arena_check,
    )


def _plan_schedule(verified: VerifiedSchedule) -> tuple[PlanResult | None, list[str]]:
    """Return the plan of a schedule with addresses, or None, and notes about it."""
    costs, stated_problem = verified.costs, verified.document.problem
    if costs is None or verified.simulation.violations:
        return None, []
    mode, doubts = default_mode(
        costs.device, None if stated_problem is None else stated_problem.deadline_counts
    )
    budget = verified.budget_bytes
    try:
        planned = PlanResult.of(
            verified.graph,
            costs,
            verified.document.schedule,
            mode=mode,
            ram_budget_bytes=budget if budget is None or budget > 0 else None,
            aux_bytes=None if stated_problem is None else stated_problem.aux_bytes,
        ).with_addresses()
    except PlanError as error:
        return None, [f"there is no plan: {error}"]
    return planned, doubts
