"""``poetmodel report``: write one self-contained HTML page about schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import options
from poetmodel.cli.inputs import check_outputs, print_notes
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError
from poetmodel.report.presenter import Fact, text_fact
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.case.case import Case
    from poetmodel.case.opening import Checked

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
) -> Reply:
    """Write an HTML page with verdict, charts and decisions of schedules, usable offline."""
    from poetmodel.report.page import check_report, report_facts, write_report

    paths = page_options.schedules
    if len(paths) > len(LABELS):
        raise InputError(f"SCHEDULE: expected at most {len(LABELS)} files, got {len(paths)}")
    check_report(page_options.out)
    inputs = (*map(str, paths), source.graph, costing.device, costing.profile)
    check_outputs(("--out", page_options.out), inputs=inputs)
    with live_line(enabled=not output.json, activity="verifying"):
        subjects = read_schedules(paths, source.case(costing))
    print_notes(*subjects)
    with live_line(enabled=not output.json, activity="drawing"):
        size_bytes = write_report(page_options.out, subjects)
    facts = report_facts(subjects)
    title = f"Report on {subjects[0].graph.name}, {format_bytes(size_bytes)}"
    return Reply(
        document={"out": str(page_options.out), "size_bytes": size_bytes, **facts},
        text=(fact_table(title, _answer_facts(facts)),),
        device_rams=[subject.device_ram for subject in subjects],
        written=(page_options.out,),
    )


def _answer_facts(report_values: dict[str, Any]) -> Iterator[Fact]:
    from poetmodel.report.wording import schedule_answers

    for entry in report_values["schedules"]:
        for answer in schedule_answers(entry):
            yield text_fact(f"{entry['label']}: {answer.question}", answer.word, answer.text)


def read_schedules(paths: Sequence[Path], case: Case) -> list[Checked]:
    """Verify up to eight files, for the first one's graph; return them with plans and labels."""
    from poetmodel.case.opening import open_schedule

    opened = [open_schedule(paths[0], case)]
    first = opened[0]
    opened += [
        open_schedule(path, first.case, graph=first.graph) for path in paths[1 : len(LABELS)]
    ]
    return [
        replace(checked.with_plan(), label=label)
        for label, checked in zip(LABELS, opened, strict=False)
    ]
