"""The page of results and the README's table: cases, stating a problem, starting up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from result_pages import constraints, grid, training
from result_pages.comparison import compared
from result_pages.records import SolveRecord
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from result_pages.records import Key

IN_README: Final = (
    ("resnet18-cifar", "rpi4b", "40%"),
    ("resnet50", "rpi4b", "50%"),
    ("bert-base", "rpi4b", "50%"),
    ("paper/vgg16-cifar", "paper-m4", "50%"),
    ("paper/vgg16-cifar", "paper-a72", "50%"),
    ("paper/resnet18-cifar", "paper-m4", "50%"),
    ("paper/resnet18-cifar", "paper-a72", "50%"),
)
"""Model, device and budget of the rows of the README's table."""


def solves(records: Sequence[dict[str, Any]], group: str) -> dict[Key, SolveRecord]:
    """Return the solves of one table by problem, in the run's order."""
    runs = [
        SolveRecord.of_case(record)
        for record in records
        if record["kind"] == "solve" and record["case"]["group"] == group
    ]
    return {run.key: run for run in runs}


def page(
    records: Sequence[dict[str, Any]], source: str, *sections: str, opening: Sequence[str] = ()
) -> str:
    """Return the page of results, with how it opens and what it says of other records."""
    of_kind = {
        kind: [record for record in records if record["kind"] == kind]
        for kind in ("solve", "build", "startup")
    }
    problems = [record["result"]["problem"] for record in of_kind["solve"]]
    text = render(
        "results",
        records=records,
        source=source,
        opening=opening,
        sections=sections,
        groups={name: solves(records, name).values() for name in ("main", "reference", "zoo")},
        limits=sorted({record["case"]["limit_s"] for record in of_kind["solve"]}),
        gaps=sorted({problem["gap"] for problem in problems}),
        formulations=sorted({problem["formulation"] for problem in problems}),
        builds=of_kind["build"],
        startups=of_kind["startup"],
    )
    return f"{text}\n"


TIMES_CHART, STEPS_CHART = "results-time.svg", "results-pytorch.svg"
"""Names of the page's first charts."""


def opening(
    solved: Sequence[dict[str, Any]],
    constrained: Sequence[dict[str, Any]],
    trained: Sequence[dict[str, Any]],
) -> list[str]:
    """Return what the page begins with: sentences and charts of the grid and of training."""
    parts = []
    if solved:
        words = grid.sentence(solved) + constraints.sentence(constrained)
        parts += [words.strip(), f"![Problems proved to 1 % after which time]({TIMES_CHART})"]
    if trained:
        alt = "Times of compiled steps and of other ways to save memory"
        parts += [training.sentence(trained).strip(), f"![{alt}]({STEPS_CHART})"]
    return parts


def readme_table(
    records: Sequence[dict[str, Any]],
    solved: Sequence[dict[str, Any]],
    constrained: Sequence[dict[str, Any]],
    trained: Sequence[dict[str, Any]],
) -> str:
    """Return the README's block.

    Of the records of all cases, the grid, own constraints, and training methods.
    """
    published = compared(solved)
    own = {**solves(records, "main"), **solves(records, "zoo")}
    rows, beside = [], []
    for key in IN_README:
        methods = published.get(key, {})
        run = own.get(key) or methods.get("default")
        if run is not None:
            rows.append((*key, run, methods.get("paper")))
            beside += [methods[name].record for name in ("default", "paper") if name in methods]
    words = (grid.sentence(solved), constraints.sentence(constrained), training.sentence(trained))
    return render(
        "results-readme", records=records, rows=rows, beside=beside, sentences="".join(words)
    )
