"""Write the pages of results and the README's table from the records of benchmark runs.

``python scripts/make_results.py`` takes the last ``*-grid.jsonl`` of ``bench/results/`` for the
grid (``docs/results-grid.md``, its plot, and its part of ``docs/results.md``) and the last
``*-captures.jsonl`` for its captured models, the last
``*-grid-again.jsonl`` for instances of it that were solved again with two threads, the last
``*-training.jsonl`` for the comparison of training methods, the last ``*-whole-step.jsonl`` for
that of whole steps, the last ``*-fused.jsonl`` for that inside of ``torch.compile``, the last
``*-step-costs.jsonl`` for what compiled steps cost, the last
``*-constraints.jsonl`` for
own constraints, the last ``*-addresses.jsonl`` for a part of ``docs/concepts/plans.md``, the last
``*-executorch.jsonl`` for a part of ``docs/guides/executorch.md``, the last ``*-masks.jsonl`` for
a part of ``docs/guides/model.md``, the last ``*-recurrent.jsonl`` for a part of
``docs/guides/export.md``, the last ``*-choice.jsonl`` for a part of
``docs/guides/choose.md`` and its chart, the last ``*-trains.jsonl`` and ``*-against.jsonl`` for
``docs/built-in-steps.md``, the last ``*-compared.jsonl`` for ``docs/compared.md`` and the
README's table of methods, the last ``*-mcu.jsonl`` for ``docs/what-trains-where.md`` and
the README's table of boards, the last ``*-aifes.jsonl`` for a section of that page, the last
``*-coverage.jsonl`` for a part of
``docs/guides/pytorch-limits.md``, the last ``*-curve.jsonl`` for the chart
``docs/training-curve.svg``, and the last other file for all else; the last
``*-ablation.jsonl`` and each ``*-ablation-*.jsonl`` for a part of ``bench/lazy-records.md``;
charts lie beside their pages, that of ``docs/results/tested.md`` is of its own table;
``docs/paper-figures.md``, the pictures beside it and the README's table of solvers are made of
``bench/results/figures/``.
Pages need jinja2 and charts matplotlib (the extra ``report``);
``--check`` writes nothing, needs no matplotlib, and exits 1 where something is not what the records
say. Without a record there is no page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))

from blocks import replace_block, update_pages  # noqa: E402
from grid import CAPTURED, GOALS, instances  # noqa: E402
from harness import latest  # noqa: E402
from result_pages import (  # noqa: E402
    ablation,
    addresses,
    aifes,
    boards,
    cases,
    charts,
    choice,
    compared,
    constraints,
    coverage,
    curve,
    executorch,
    figures,
    grid,
    masks,
    recurrent,
    step_costs,
    tested,
    training,
    trains,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from result_pages.drawing import Chart

RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "docs" / "results.md"
GRID_PAGE: Final = ROOT / "docs" / "results-grid.md"
FIGURES_PAGE: Final = ROOT / "docs" / "paper-figures.md"
BUILT_IN_PAGE: Final = ROOT / "docs" / "built-in-steps.md"
MODELS_PAGE: Final = ROOT / "docs" / "guides" / "pytorch-limits.md"
TRAINS_PAGE: Final = ROOT / "docs" / "what-trains-where.md"
INDEX: Final = ROOT / "docs" / "index.md"
TESTED_PAGE: Final = ROOT / "docs" / "results" / "tested.md"
ABLATION_PAGE: Final = ROOT / "bench" / "lazy-records.md"
COMPARED_PAGE: Final = ROOT / "docs" / "compared.md"
PLANS_PAGE: Final = ROOT / "docs" / "concepts" / "plans.md"
EXECUTORCH_PAGE: Final = ROOT / "docs" / "guides" / "executorch.md"
EXPORT_PAGE: Final = ROOT / "docs" / "guides" / "export.md"
STEP_PAGE: Final = ROOT / "docs" / "guides" / "model.md"
CHOICE_PAGE: Final = ROOT / "docs" / "guides" / "choose.md"
README: Final = ROOT / "README.md"
BLOCKS: Final[tuple[tuple[str, Path, str, Callable[[Any, str], str]], ...]] = (
    ("*-addresses.jsonl", PLANS_PAGE, "fragmentation", addresses.block),
    ("*-executorch.jsonl", EXECUTORCH_PAGE, "arenas", executorch.block),
    ("*-masks.jsonl", STEP_PAGE, "masks", masks.block),
    ("*-recurrent.jsonl", EXPORT_PAGE, "recurrent", recurrent.block),
    ("*-choice.jsonl", CHOICE_PAGE, "choice", choice.block),
    ("*-coverage.jsonl", MODELS_PAGE, "models", coverage.block),
)
"""Records that a part of a page is made of: that part, and what makes it."""


def read_newest(pattern: str) -> tuple[str, list[dict[str, Any]]]:
    """Return name and records of the last file that matches; "" and [] without one."""
    files = sorted(RESULTS.glob(pattern))
    return (files[-1].name, latest(files[-1]).records()) if files else ("", [])


def read_grid() -> tuple[str, list[dict[str, Any]]]:
    """Return names and records of the grid: of the last file, and of that of captured models.

    Captured models of the former count only where there is no file of the latter.
    """
    source, solved = read_newest("*-grid.jsonl")
    captures_source, captured = read_newest("*-captures.jsonl")
    if captured:
        solved = [record for record in solved if record["cell"]["goal"] not in CAPTURED]
    names = [f"`bench/results/{name}`" for name in (source, captures_source) if name]
    return " and ".join(names), solved + captured


def due() -> dict[Path, str]:
    """Return the pages as they should be."""
    readme = README.read_text(encoding="utf-8")
    pages = {FIGURES_PAGE: figures.page_text(FIGURES_PAGE, RESULTS / "figures")}
    ablations = sorted(RESULTS.glob("*-ablation.jsonl"))
    if ablations:
        text = ABLATION_PAGE.read_text(encoding="utf-8")
        files = (ablations[-1], *sorted(RESULTS.glob("*-ablation-*.jsonl")))
        block = ablation.page(*map(ablation.read, files))
        pages[ABLATION_PAGE] = replace_block(text, "ablation", block)
    readme = replace_block(readme, "solvers", figures.readme_solvers(RESULTS / "figures"))
    boards_source, exported = read_newest("*-mcu.jsonl")
    trains_source, stepped = read_newest("*-trains.jsonl")
    if stepped:
        against_source, commits = read_newest("*-against.jsonl")
        made = trains.page(stepped, trains_source, commits, against_source)
        pages[BUILT_IN_PAGE] = made
    if exported:
        aifes_source, beside_aifes = read_newest("*-aifes.jsonl")
        section = aifes.section(beside_aifes, aifes_source)
        pages[TRAINS_PAGE] = boards.page(exported, boards_source, section)
        readme = replace_block(readme, "boards", boards.readme_table(exported))
    compared_source, beside = read_newest("*-compared.jsonl")
    if beside:
        pages[COMPARED_PAGE] = compared.page(beside, compared_source)
        readme = replace_block(readme, "compared", compared.readme_table(beside))
        lead = (
            "The price of less RAM is extra energy, the *overhead*. "
            f"{compared.lead(beside)}: [the table](#how-much-better-than-what)."
        )
        readme = replace_block(readme, "lead", lead)
    for pattern, page, name, part in BLOCKS:
        made_of, kept = read_newest(pattern)
        if kept:
            pages[page] = replace_block(page.read_text("utf-8"), name, part(kept, made_of))
    claims = _claims(exported)
    if claims:
        text = INDEX.read_text(encoding="utf-8")
        pages[INDEX] = replace_block(text, "claims", claims)
    return pages | _results(readme)


def _results(readme: str) -> dict[Path, str]:
    """Return the pages of results, and the README with what they come to."""
    source, records = read_newest("*[0-9].jsonl")
    if not records:
        return {README: replace_block(readme, "results", figures.NOTHING_YET)}
    pages: dict[Path, str] = {}
    grid_source, solved = read_grid()
    constrained_source, constrained = read_newest("*-constraints.jsonl")
    training_source, trained = read_newest("*-training.jsonl")
    sections = []
    if solved:
        once = all(record.get("threads", 1) == 1 for record in read_newest("*-grid.jsonl")[1])
        again = read_newest("*-grid-again.jsonl")[1] if once else []
        run = {record["cell"]["goal"] for record in solved}
        wanted = [goal for goal in GOALS if goal not in CAPTURED or goal in run]
        registered = {goal: len(instances((goal,))) for goal in wanted}
        sections.append(grid.section(solved, grid_source, registered=registered, again=again))
        pages[GRID_PAGE] = grid.full_page(solved, grid_source)
    if constrained:
        sections.append(constraints.section(constrained, constrained_source))
    if trained:
        sections.append(training.section(trained, training_source))
    whole_source, whole = read_newest("*-whole-step.jsonl")
    if whole:
        sections.append(training.whole_section(whole, whole_source))
    fused_source, fused = read_newest("*-fused.jsonl")
    if fused:
        sections.append(training.fused_section(fused, fused_source))
    lora_source, adapted = read_newest("*-lora.jsonl")
    if adapted:
        sections.append(training.lora_section(adapted, lora_source))
    costs_source, costs = read_newest("*-step-costs.jsonl")
    if costs:
        sections.append(step_costs.section(costs, costs_source))
    opening = cases.opening(solved, constrained, trained)
    pages[PAGE] = cases.page(records, source, *sections, opening=opening)
    table = cases.readme_table(records, solved, constrained, trained)
    pages[README] = replace_block(readme, "results", table)
    return pages


def _claims(exported: Sequence[dict[str, Any]]) -> str:
    """Return what the first page says of measurements, each with where to read on."""
    _, solved = read_grid()
    _, trained = read_newest("*-training.jsonl")
    _, beside = read_newest("*-compared.jsonl")
    said = (
        (f"{compared.lead(beside)}." if beside else "", f"[Every method]({COMPARED_PAGE.name})"),
        (grid.sentence(solved), f"[Every instance]({GRID_PAGE.name})"),
        (training.sentence(trained), f"[All measurements]({PAGE.name})"),
        (boards.lead(exported), f"[Every network and board]({TRAINS_PAGE.name})"),
    )
    return "\n".join(f"- {text.strip()} {link}." for text, link in said if text)


def charts_due() -> dict[Path, Chart]:
    """Return the charts as they should be, each beside its page."""
    _, solved = read_grid()
    _, trained = read_newest("*-training.jsonl")
    _, whole = read_newest("*-whole-step.jsonl")
    _, stepped = read_newest("*-trains.jsonl")
    _, exported = read_newest("*-mcu.jsonl")
    _, losses = read_newest("*-curve.jsonl")
    _, beside = read_newest("*-compared.jsonl")
    _, choices = read_newest("*-choice.jsonl")
    found = {
        PAGE.parent / choice.CHART: choice.chart(choices),
        PAGE.with_name(cases.TIMES_CHART): charts.times(solved),
        PAGE.with_name(cases.STEPS_CHART): charts.steps(trained),
        PAGE.with_name(training.WHOLE_STEPS_CHART): charts.whole_steps(whole),
        PAGE.with_name(grid.SCALE_CHART): charts.scale(solved),
        GRID_PAGE.with_name(grid.OVERHEAD_CHART): charts.overheads(solved),
        BUILT_IN_PAGE.with_name(trains.LEAST_CHART): charts.least_ram(stepped),
        BUILT_IN_PAGE.with_name(trains.BOARDS_CHART): charts.on_boards(stepped),
        TRAINS_PAGE.with_name(boards.CHART): charts.exported(exported),
        PAGE.with_name("training-curve.svg"): curve.chart(losses),
        TESTED_PAGE.with_name(tested.CHART): tested.chart(TESTED_PAGE.read_text(encoding="utf-8")),
        COMPARED_PAGE.with_name(compared.CHART): compared.chart(beside),
        FIGURES_PAGE.with_name("paper-overview.svg"): figures.overview(RESULTS / "figures"),
    }
    return {path: chart for path, chart in found.items() if chart.shown}


def update_charts(*, check: bool) -> int:
    """Draw the charts that are not what the records say, or only say so; return the status."""
    stale = {path: chart for path, chart in charts_due().items() if not chart.current(path)}
    for path, chart in stale.items():
        sys.stdout.write(f"{'stale' if check else 'wrote'} {path}\n")
        if not check:
            chart.write(path)
    return int(check and bool(stale))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    options = parser.parse_args(arguments)
    pages = due()
    status = max(
        update_pages(pages, check=options.check),
        update_charts(check=options.check),
        figures.update_pictures(FIGURES_PAGE, RESULTS / "figures", check=options.check),
    )
    for path in (PAGE, GRID_PAGE, BUILT_IN_PAGE, TRAINS_PAGE, COMPARED_PAGE):
        if path not in pages and path.exists():
            sys.stdout.write(f"{path} has no record\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
