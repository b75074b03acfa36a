"""``poetmodel report``: one self-contained HTML page about schedules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import graphs, options
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.output import figures, print_json, show
from poetmodel.cli.plan_output import default_mode, told
from poetmodel.errors import InputError, PlanError, ScheduleError
from poetmodel.graph.catalogue import OWN_SHAPE, InputShape, read_model_or_file
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.bench.tables import Row
    from poetmodel.cli.plan_output import Planned
    from poetmodel.cli.verify import Judgement
    from poetmodel.graph import Graph
    from poetmodel.report.subject import Sources, Subject
    from poetmodel.schedule.io import ScheduleDocument

EPILOG: Final = "Example: poetmodel report mlp.json --graph mlp --out report.html"

LABELS: Final = "ABCDEFGH"
"""The labels of the schedules on the page."""

SchedulesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="SCHEDULE...",
        help="Schedule files, *.schedule.json, of one graph, shown side by side. A file from "
        "step.report('step.json') of a compiled PyTorch step holds its own graph.",
        show_default=False,
    ),
]
SweepOption = Annotated[
    Path | None,
    typer.Option(
        "--sweep",
        metavar="DIR",
        help="Folder of a sweep, for the chart of energy against RAM.",
        rich_help_panel=options.WHAT,
        show_default=False,
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FILE",
        help="The page, *.html.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("report", epilog=EPILOG)(report)


def report(
    schedules: SchedulesArgument,
    *,
    out: OutOption,
    graph: graphs.GraphOption = None,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    device: options.DeviceOption = None,
    profile: options.ProfileOption = None,
    sweep: SweepOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Write one HTML page with verdict, charts and decisions of schedules; it needs no network."""
    from poetmodel.report.page import check_report, report_facts, write_report

    if len(schedules) > len(LABELS):
        msg = f"SCHEDULE: expected at most {len(LABELS)} files, got {len(schedules)}"
        raise InputError(msg)
    shape = InputShape(batch=batch, image=image, sequence=sequence)
    check_report(out)
    options.check_output(out, inputs=(*map(str, schedules), graph, device, profile))
    cells, front = ([], []) if sweep is None else read_sweep(sweep)
    subjects = read_subjects(schedules, graph, shape, device=device, profile=profile)
    print_warnings(dict.fromkeys(note for subject in subjects for note in subject.notes))
    rooms = [subject.room for subject in subjects if subject.room is not None]
    print_warnings(dict.fromkeys(text for room in rooms if (text := room.warning())))
    size_bytes = write_report(out, subjects, cells=cells, front=front)
    told(out)
    found = report_facts(subjects, cells=cells, front=front)
    if json:
        print_json({"out": str(out), "size_bytes": size_bytes, **found})
        return
    name = subjects[0].graph.name
    show(figures(f"Report on {name}, {format_bytes(size_bytes)}", _rows(found)))


def read_subjects(
    paths: Sequence[Path],
    graph: str | None,
    shape: InputShape = OWN_SHAPE,
    *,
    device: str | None,
    profile: str | None,
) -> list[Subject]:
    """Read and verify schedule files, and compiled steps, which hold their own graph.

    Raises
    ------
    InputError
        If there is no graph, a file cannot be read, or belongs to another graph.
    """
    from poetmodel.cli.graphs import NamedGraph, graph_of
    from poetmodel.data import read_text
    from poetmodel.report.step_file import parse_step, step_subject
    from poetmodel.report.subject import Sources
    from poetmodel.schedule.io import load_document

    steps = {path: parse_step(read_text(path)) for path in paths}
    given: NamedGraph | None = None
    if graph is not None:
        given = NamedGraph(graph=read_model_or_file(graph, shape), name=graph, shape=shape)
    known: dict[Path, Subject] = {}
    for label, path in zip(LABELS, paths, strict=False):
        values = steps[path]
        if values is not None:
            known[path] = step_subject(values, source=str(path), label=label)
            brought = known[path].graph
            given = NamedGraph(graph=brought, name=brought.name) if given is None else given
            if brought.sha256 != given.graph.sha256:
                msg = f"{path}: the step has another graph than {given.graph.name!r} of this report"
                raise ScheduleError(msg)
    if given is None:
        first = load_document(paths[0])
        given = graph_of(None, shape, first.schedule.identity, source=str(paths[0]))
    subjects = []
    for label, path in zip(LABELS, paths, strict=False):
        if path in known:
            subjects.append(known[path])
            continue
        sources = Sources(
            schedule=str(path),
            graph=given.name,
            shape=given.shape,
            device=device,
            profile=profile,
        )
        try:
            subjects.append(read_subject(given.graph, sources, label=label))
        except ScheduleError as error:
            raise error.within(str(path)) from None
    return subjects


def read_subject(graph: Graph, sources: Sources, *, label: str = "A") -> Subject:
    """Read and verify a schedule file, and plan its schedule if that is possible.

    Raises
    ------
    ScheduleError
        If the file cannot be read, or belongs to another graph.
    """
    from poetmodel.cli.verify import judge
    from poetmodel.data import read_text
    from poetmodel.report.subject import Subject, in_graph
    from poetmodel.schedule.io import parse_document

    document = parse_document(read_text(sources.schedule), source="")
    judgement = judge(document, graph, device=sources.device, profile=sources.profile)
    planned, notes = _planned(document, judgement, graph)
    return Subject(
        label=label,
        sources=sources,
        document=document,
        schedule=in_graph(graph, document.schedule),
        problem=judgement.problem,
        costs=judgement.costs,
        verdict=judgement.verdict,
        notes=(*judgement.notes, *notes),
        plan=None if planned is None else planned.plan,
        check=None if planned is None else planned.check,
    )


def read_sweep(folder: Path) -> tuple[list[Row], list[Row]]:
    """Return the runs in the folder of a sweep, and their Pareto front.

    Raises
    ------
    InputError
        If the folder has no records.
    """
    from poetmodel.bench import tables
    from poetmodel.bench.store import RECORDS, Store

    if not (folder / RECORDS).is_file():
        msg = f"--sweep {folder}: expected a folder that 'poetmodel sweep' wrote, with {RECORDS}"
        raise InputError(msg)
    found = tables.rows(Store(folder).records())
    if not found:
        msg = f"--sweep {folder}: {RECORDS} holds no runs"
        raise InputError(msg)
    return found, tables.pareto(found)


def _planned(
    document: ScheduleDocument, judgement: Judgement, graph: Graph
) -> tuple[Planned | None, list[str]]:
    """Return the plan of a schedule that can run, and notes about it."""
    from poetmodel.cli.plan import make
    from poetmodel.cli.plan_output import mode_notes

    costs, problem = judgement.costs, judgement.problem
    if costs is None or judgement.verdict.simulation.violations:
        return None, []
    stated = document.problem
    meaning = None if stated is None else stated.deadline_counts
    budget = None if stated is None else problem.usable_ram_bytes
    try:
        made = make(
            document,
            graph,
            costs,
            mode=default_mode(costs.device, meaning),
            ram_budget_bytes=budget if budget is None or budget > 0 else None,
        )
    except PlanError as error:
        return None, [f"there is no plan: {error}"]
    return made, mode_notes(costs.device, meaning)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    from poetmodel.report.step_wording import step_answers
    from poetmodel.report.wording import answers

    for entry in found["schedules"]:
        of_step = () if entry["step"] is None else step_answers(entry["step"])
        for answer in (*of_step, *answers(entry)):
            yield f"{entry['label']}: {answer.question}", answer.word, answer.text
