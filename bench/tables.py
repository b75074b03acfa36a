"""Every table of results, and the numbers that pages quote, from ``bench/results/``.

`TABLES` has the tables of pages between ``<!-- begin table NAME -->`` and ``<!-- end table -->``,
and `CSVS` the longer tables in files. ``scripts/make_pages.py`` writes both, and checks that pages
quote the numbers of `compute_quoted_numbers`.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Final

import pandas as pd

import solve_tables as solves
import step_tables as steps
from measured import (
    CASES,
    ONE_PERCENT,
    format_code,
    format_count,
    format_factors,
    format_integer,
    format_percent,
    format_seconds,
    format_table,
    load_frame,
    read_figure_records,
    read_records,
)
from poetmodel.sweeps.measurement import NOT_APPLICABLE, REFUSED
from poetmodel.sweeps.summaries import figure_summaries, status_text
from poetmodel.sweeps.tables import rows
from poetmodel.units import format_bytes
from solver_tables import REJECTED, tabulate_solvers

if TYPE_CHECKING:
    from collections.abc import Callable

# -- figures of the paper --------------------------------------------------------------------------


def _tabulate_figure(name: str, *, words: int) -> str:
    """Return the tables of a paper figure as one; with several, the first column is the graph.

    Rows without a last cell are omitted then.
    """
    summaries = figure_summaries(name, rows(read_figure_records(name)))
    if len(summaries) == 1:
        return format_table(summaries[0].rows, summaries[0].heads, words=words)
    lines = [
        (summary.title.partition(": ")[2].partition(",")[0], *line)
        for summary in summaries
        for line in summary.rows
        if line[-1]
    ]
    return format_table(lines, ("graph", *summaries[0].heads), words=words)


def _load_solver_times() -> dict[tuple[str, str], dict[str, str]]:
    """Return the time or remaining gap of each solver as text, by problem and formulation.

    Only the runs with the largest limit count. A † marks schedules that the verifier rejects.
    """
    solver_rows = rows(read_figure_records("solvers"))
    limit_s = max(row["time_limit_s"] for row in solver_rows)
    solvers = dict.fromkeys(str(row["backend"]) for row in solver_rows)
    times: dict[tuple[str, str], dict[str, str]] = {}
    for summary in tabulate_solvers([row for row in solver_rows if row["time_limit_s"] == limit_s]):
        model, _, rest = summary.title.partition(" on ")
        for solver, formulation, _, status, _, _, gap, seconds in summary.rows:
            key = f"`{model}` on {rest}", formulation
            cells = times.setdefault(key, dict.fromkeys(solvers, "-"))
            if status == status_text({"status": REFUSED}):
                cells[solver] = status
            elif gap in ("-", "none in time"):
                cells[solver] = f"no solution in {seconds}"
            else:
                mark = " †" if REJECTED in status else ""
                cells[solver] = f"{seconds if gap == '0 %' else f'gap {gap} after {seconds}'}{mark}"
    return times


def _tabulate_solvers() -> str:
    times = _load_solver_times()
    headings = ("problem", "formulation", *next(iter(times.values())))
    lines = [
        (problem, f"`{formulation}`", *cells.values())
        for (problem, formulation), cells in times.items()
    ]
    return format_table(lines, headings, words=len(headings))


_README_PROBLEMS: Final = (
    "`paper/transformer` on paper-m4, 90% of RAM",
    "`paper/linear` on paper-m4, 50% of RAM",
    "`paper/vgg16-cifar` on paper-m4, 70% of RAM",
    "`paper/vgg16-cifar` on paper-a72, 70% of RAM",
)


def _tabulate_readme_solvers() -> str:
    """Return a row for each problem: the times of each solver with `paper` and `compact`."""
    times = _load_solver_times()
    lines = []
    for problem in _README_PROBLEMS:
        paper, compact = (times[problem, formulation] for formulation in ("paper", "compact"))
        cells = (
            cell if cell == compact[solver] else f"{cell} / {compact[solver]}"
            for solver, cell in paper.items()
        )
        lines.append((problem, *cells))
    solvers = next(iter(times.values()))
    return format_table(lines, ("problem", *solvers), words=1 + len(solvers))


def _load_figure(name: str) -> pd.DataFrame:
    columns = ["model", "device", "ram", "deadline", "method", "backend", "formulation", "status",
               "termination", "energy_j", "baseline_energy_j", "overhead_j", "overhead_bound_j",
               "gap", "peak_ram_bytes", "makespan_s", "columns", "rows", "nodes", "seconds",
               "cpu_s", "reason"]  # fmt: skip
    return pd.DataFrame(rows(read_figure_records(name)))[columns]


# -- registries ------------------------------------------------------------------------------------

TABLES: Final[dict[str, Callable[[], str]]] = {
    "methods": solves.tabulate_methods,
    "methods-readme": solves.tabulate_readme_methods,
    "distribution": solves.tabulate_distribution,
    "kinds": solves.tabulate_kinds,
    "grid": solves.tabulate_grid,
    "gaps-over-time": solves.tabulate_gaps_over_time,
    "tiled": solves.tabulate_tiled,
    "missed": solves.tabulate_missed,
    "scale": solves.tabulate_scale,
    "captured": solves.tabulate_captured,
    "others": solves.tabulate_formulations,
    "ablation": solves.tabulate_ablation,
    "compiled": steps.tabulate_compiled,
    "kept": steps.tabulate_keep_all,
    "fused": steps.tabulate_fused,
    "library": steps.tabulate_library,
    "processes": steps.tabulate_processes,
    "library-inductor": partial(steps.tabulate_library, "stock"),
    "boards": steps.tabulate_boards,
    "board-steps": steps.tabulate_board_steps,
    "boards-readme": steps.tabulate_readme_boards,
    "board-ways": steps.tabulate_board_ways,
    "aifes": steps.tabulate_aifes,
    "int8-steps": steps.tabulate_int8_steps,
    "int8-agreement": steps.tabulate_int8_agreement,
    "int8-accuracy": steps.tabulate_int8_accuracy,
    "int8-replay": steps.tabulate_int8_replay,
    "int8-training": steps.tabulate_int8_training,
    "trained-steps": steps.tabulate_trained_steps,
    "floors": steps.tabulate_floors,
    "cmsis-nn": steps.tabulate_cmsis_nn,
    "figure2": partial(_tabulate_figure, "figure2", words=3),
    "table3": partial(_tabulate_figure, "table3", words=2),
    "solvers": _tabulate_solvers,
    "solvers-readme": _tabulate_readme_solvers,
    "models": steps.tabulate_libraries,
}
"""Function that returns each table of a page in Markdown, by name of its block."""

_GRID: Final = ["goal", "model", "device", "ram", "deadline", "method", "status", "seconds",
                "gap", "overhead_ratio", "columns_", "rows_", "first_schedule_s",
                "memory_bytes"]  # fmt: skip
_MODELS: Final = ["name", "library_version", "status", "nodes", "back_end_status", "reason",
                  "line"]  # fmt: skip

CSVS: Final[dict[str, Callable[[], pd.DataFrame]]] = {
    "methods": solves.summarize_methods_by_kind,
    "layered": solves.load_layered_runs,
    "grid": lambda: solves.load_solves()[_GRID],
    "training": partial(steps.load_training_runs, "training"),
    "fused": partial(steps.load_training_runs, "fused"),
    "library": partial(steps.load_training_runs, "library"),
    "boards": steps.load_board_runs,
    "kernels": steps.load_kernels,
    "int8-training": steps.load_int8_training_runs,
    "models": lambda: steps.load_models()[_MODELS],
    **{
        name: partial(_load_figure, name)
        for name in ("figure3", "figure4", "figure5", "table3", "solvers")
    },
}
"""Function that returns each table that is written as a CSV file, by file name."""


def format_csv(frame: pd.DataFrame) -> str:
    """Format a table as CSV, with six significant digits for numbers that are not integers.

    Columns ``columns_`` and ``rows_``, so called because frames have such attributes, lose the bar.
    """
    text: str = frame.convert_dtypes().to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text.replace(",columns_", ",columns").replace(",rows_", ",rows")


# -- quoted numbers --------------------------------------------------------------------------------


def compute_quoted_numbers() -> dict[str, str]:
    """Return the numbers that pages quote as text, by the name in their marks."""
    return {**_quote_methods(), **_quote_solves(), **_quote_training(), **_quote_boards()}


def _quote_methods() -> dict[str, str]:
    runs = solves.load_overheads()
    table = solves.summarize_methods(runs).set_index("method")
    best, greedy, optimal = (table.loc[name] for name in (solves.BEST, "greedy", "optimal"))
    optimum = runs[runs.method == "optimal"]
    checkmate = runs[(runs.method == "checkmate") & runs.value.isna()]
    chosen = runs[runs.method == solves.BEST]
    return {
        "problems": str(len(optimum)),
        "proved": str(int(optimum.proved.sum())),
        "optimal_solved": format_integer(optimal.solved),
        "optimal_ties": str(int(optimal.ties)),
        "best_unsolved": format_integer(best.tried - best.solved),
        "best_median": format_factors(best.median_low, best.median_high),
        "best_worst": format_factors(best.worst_low, best.worst_high),
        "best_ties": str(int(best.ties)),
        "greedy_median": format_factors(greedy.median_low, greedy.median_high),
        "greedy_worst": format_factors(greedy.worst_low, greedy.worst_high),
        "greedy_ties": str(int(greedy.ties)),
        "least": format_percent((optimum.least / optimum.single_pass).median()),
        "best_extra": format_percent(
            ((chosen.value - chosen.least) / chosen.single_pass).median(), 2
        ),
        "free": str(int((optimum.least == 0).sum())),
        "checkmate_unsolved": str(len(checkmate)),
        "checkmate_proofs": str(int((checkmate.status == NOT_APPLICABLE).sum())),
    }


def _quote_solves() -> dict[str, str]:
    all_solves = solves.load_solves()
    proofs = solves.count_proofs(all_solves, "goal").set_index("goal").loc[1]
    feasible = all_solves[(all_solves.goal == 1) & ~all_solves.infeasible]
    cases = load_frame(CASES).set_index("name").seconds
    a72 = all_solves[(all_solves.goal == 4) & (all_solves.device == "paper-a72")]
    return {
        "import": format_seconds(cases["import poetmodel"]),
        "help": format_seconds(cases["poetmodel --help"]),
        "scale_a72": format_seconds(a72.to_1.max()),
        "grid_proved": format_count(int(proofs.within_1), int(proofs.able)),
        "grid_able_proved": f"{int(proofs.within_1)} of {int(proofs.able)}",
        "grid_exact": f"{int((feasible.gap <= ONE_PERCENT / 100).sum())}",
        "grid_median": format_seconds(proofs.median_s),
        "gurobi_fits": format_count(
            int(((feasible.columns_ <= 2000) & (feasible.rows_ <= 2000)).sum()), len(feasible)
        ),
    }  # fmt: skip


def _quote_training() -> dict[str, str]:
    numbers: dict[str, str] = {}
    for name, kind in (("compiled", "training"), ("fused", "fused"), ("library", "library")):
        runs = steps.load_training(kind)
        compiled = runs[runs.own & runs.ran]
        numbers |= {
            f"{name}_ran": str(len(compiled)),
            f"{name}_networks": str(compiled.network.nunique()),
            f"{name}_within": str(int(compiled.within.sum())),
            f"{name}_equal": str(int(compiled.equal.sum())),
        }
        if name == "compiled":
            duels = steps.compare_at_equal_peak(runs)
            numbers |= {f"{name}_won": str(int(duels.won.sum())), f"{name}_duels": str(len(duels))}
    fused = steps.compare_with_stock(steps.load_training("fused"))
    ratios = [compiled.processor / peer.processor for peer, compiled in steps.pair_with_peers()
              if compiled is not None and compiled.ran]  # fmt: skip
    return numbers | {
        "library_median": f"{statistics.median(ratios):.2f}",
        "library_best": f"{min(ratios):.2f}",
        "library_worst": f"{max(ratios):.2f}",
        "fused_median": f"{fused.ratio.median():.2f}",
        "fused_worst": f"{fused.ratio.max():.2f}",
    }


def _quote_boards() -> dict[str, str]:
    runs = [run for run in steps.select_part("board") if run["trains"]]
    kept = {run["network"]: run for run in steps.select_part("keep-all") if run["trains"]}
    best = max(
        (run for run in runs if run["network"] in kept),
        key=lambda run: (
            kept[run["network"]]["ram_bytes"] / run["limit_bytes"],
            -run["instructions"],
        ),
    )
    nodes = steps.load_kernels()
    equal_states = [run["state_sha256"] == kept[run["network"]]["state_sha256"] for run in runs]
    programs = [record["programs"] for record in read_records("aifes")]

    def format_ratios(field: str) -> str:
        ratios = [program["aifes"][field] / program["keep_all"][field] for program in programs]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    models = steps.load_models()
    cmsis_ratios = [row["ours"] / row["theirs"] for row in steps.load_cmsis_nn_rows()]
    return {
        "cmsis_least": f"{min(cmsis_ratios):.0%}".rstrip("%"),
        "cmsis_most": f"{max(cmsis_ratios):.0%}".rstrip("%"),
        "board_network": format_code(best["network"]),
        "board": format_code(best["board"]),
        "board_ram": format_bytes(best["limit_bytes"]),
        "board_kept": format_bytes(kept[best["network"]]["ram_bytes"]),
        "board_times": f"{best['instructions'] / kept[best['network']]['instructions']:.2f}",
        "board_same": f"{sum(equal_states)} of {len(equal_states)}",
        "kernels": f"{int((nodes.per_mac <= 12).sum())} of {len(nodes)}",
        "kernel_median": f"{statistics.median(nodes.per_mac):.2f}",
        "kernel_worst": f"{nodes.per_mac.max():.2f}",
        "aifes_instructions": format_ratios("instructions"),
        "aifes_ram": format_ratios("ram_bytes"),
        "models": format_integer(len(models)),
        "models_work": format_integer(models.works.sum()),
        "models_after_line": format_integer(models.works_after_line.sum()),
        "models_refused": format_integer((models.refused & ~models.works_after_line).sum()),
        "models_back_end": format_integer((models.back_end_status == "works").sum()),
    }
