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
    figure_records,
    figures,
    load,
    percent_text,
    records,
    seconds_text,
    share_text,
    times_text,
    whole,
)
from poetmodel.sweeps.measurement import NOT_APPLICABLE, REFUSED
from poetmodel.sweeps.summaries import figure_summaries, status_text
from poetmodel.sweeps.tables import rows
from poetmodel.units import format_bytes
from solver_tables import comparison

if TYPE_CHECKING:
    from collections.abc import Callable

# -- figures of the paper --------------------------------------------------------------------------


def _figure(name: str, *, words: int) -> str:
    """Return the tables of a paper figure as one table; its first column is the problem."""
    parts = figure_summaries(name, rows(figure_records(name)))
    if len(parts) == 1:
        return figures(parts[0].rows, parts[0].heads, words=words)
    lines = [
        (part.title.partition(": ")[2].partition(",")[0], *line)
        for part in parts
        for line in part.rows
        if line[-1]
    ]
    return figures(lines, ("graph", *parts[0].heads), words=words)


def _solver_times() -> dict[tuple[str, str], dict[str, str]]:
    """Return the time or remaining gap of each solver, by problem and formulation."""
    table = rows(figure_records("solvers"))
    limit_s = max(row["time_limit_s"] for row in table)
    solvers = dict.fromkeys(str(row["backend"]) for row in table)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for part in comparison([row for row in table if row["time_limit_s"] == limit_s]):
        model, _, rest = part.title.partition(" on ")
        for solver, formulation, _, status, _, _, gap, seconds in part.rows:
            key = f"`{model}` on {rest}", formulation
            cells = found.setdefault(key, dict.fromkeys(solvers, "-"))
            if status == status_text({"status": REFUSED}):
                cells[solver] = status
            elif gap in ("-", "none in time"):
                cells[solver] = f"no solution in {seconds}"
            else:
                cells[solver] = seconds if gap == "0 %" else f"gap {gap} after {seconds}"
    return found


def _solvers() -> str:
    found = _solver_times()
    heads = ("problem", "formulation", *next(iter(found.values())))
    lines = [(problem, f"`{form}`", *cells.values()) for (problem, form), cells in found.items()]
    return figures(lines, heads, words=len(heads))


_IN_README: Final = (
    "`paper/transformer` on paper-m4, 90% of RAM",
    "`paper/linear` on paper-m4, 50% of RAM",
    "`paper/vgg16-cifar` on paper-m4, 70% of RAM",
    "`paper/vgg16-cifar` on paper-a72, 70% of RAM",
)


def _solvers_readme() -> str:
    """Return a row for each problem: the times of each solver with `paper` and `compact`."""
    found = _solver_times()
    lines = []
    for problem in _IN_README:
        paper, compact = (found[problem, form] for form in ("paper", "compact"))
        cells = (
            cell if cell == compact[solver] else f"{cell} / {compact[solver]}"
            for solver, cell in paper.items()
        )
        lines.append((problem, *cells))
    solvers = next(iter(found.values()))
    return figures(lines, ("problem", *solvers), words=1 + len(solvers))


def _figure_cells(name: str) -> pd.DataFrame:
    columns = ["model", "device", "ram", "deadline", "method", "backend", "formulation", "status",
               "termination", "energy_j", "baseline_energy_j", "overhead_j", "overhead_bound_j",
               "gap", "peak_ram_bytes", "makespan_s", "columns", "rows", "nodes", "seconds",
               "cpu_s", "reason"]  # fmt: skip
    return pd.DataFrame(rows(figure_records(name)))[columns]


# -- all of them -----------------------------------------------------------------------------------

TABLES: Final[dict[str, Callable[[], str]]] = {
    "methods": solves.methods,
    "methods-readme": solves.methods_readme,
    "distribution": solves.distribution,
    "kinds": solves.kinds,
    "grid": solves.grid,
    "gaps-over-time": solves.gaps_over_time,
    "tiled": solves.tiled,
    "missed": solves.missed,
    "scale": solves.scale,
    "captured": solves.captured,
    "others": solves.others,
    "ablation": solves.ablation,
    "compiled": steps.compiled,
    "kept": steps.kept,
    "fused": steps.fused,
    "library": steps.library,
    "processes": steps.processes,
    "library-inductor": partial(steps.library, "stock"),
    "boards": steps.boards,
    "board-steps": steps.board_steps,
    "boards-readme": steps.boards_readme,
    "board-ways": steps.board_ways,
    "aifes": steps.aifes,
    "int8-steps": steps.int8_steps,
    "int8-agreement": steps.int8_agreement,
    "int8-accuracy": steps.int8_accuracy,
    "int8-replay": steps.int8_replay,
    "int8-training": steps.int8_training,
    "trained-steps": steps.trained_steps,
    "floors": steps.floors,
    "cmsis-nn": steps.cmsis_nn,
    "figure2": partial(_figure, "figure2", words=3),
    "table3": partial(_figure, "table3", words=2),
    "solvers": _solvers,
    "solvers-readme": _solvers_readme,
    "models": steps.libraries,
}
"""Function that returns each table of a page, in Markdown."""

_GRID: Final = ["goal", "model", "device", "ram", "deadline", "method", "status", "seconds",
                "gap", "overhead_ratio", "columns_", "rows_", "first_schedule_s",
                "memory_bytes"]  # fmt: skip
_MODELS: Final = ["name", "library_version", "status", "nodes", "back_end_status", "reason"]

CSVS: Final[dict[str, Callable[[], pd.DataFrame]]] = {
    "methods": solves.methods_by_kind,
    "layered": solves.layered,
    "grid": lambda: solves.solves()[_GRID],
    "training": partial(steps.training_runs, "training"),
    "fused": partial(steps.training_runs, "fused"),
    "library": partial(steps.training_runs, "library"),
    "boards": steps.board_runs,
    "kernels": steps.kernels,
    "int8-training": steps.int8_training_runs,
    "models": lambda: steps.models()[_MODELS],
    **{
        name: partial(_figure_cells, name)
        for name in ("figure3", "figure4", "figure5", "table3", "solvers")
    },
}
"""Function that returns each table that is a file."""


def format_csv(frame: pd.DataFrame) -> str:
    """Format a table as CSV, with six significant digits for numbers that are not integers."""
    text: str = frame.convert_dtypes().to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text.replace(",columns_", ",columns").replace(",rows_", ",rows")


# -- quoted numbers --------------------------------------------------------------------------------


def compute_quoted_numbers() -> dict[str, str]:
    """Return the numbers that pages quote, by name."""
    return {**_of_methods(), **_of_solves(), **_of_training(), **_of_boards()}


def _of_methods() -> dict[str, str]:
    runs = solves.overheads()
    table = solves.times_least(runs).set_index("method")
    best, greedy, optimal = (table.loc[name] for name in (solves.BEST, "greedy", "optimal"))
    optimum = runs[runs.method == "optimal"]
    checkmate = runs[(runs.method == "checkmate") & runs.value.isna()]
    chosen = runs[runs.method == solves.BEST]
    return {
        "problems": str(len(optimum)),
        "proved": str(int(optimum.proved.sum())),
        "optimal_solved": whole(optimal.solved),
        "optimal_ties": str(int(optimal.ties)),
        "best_unsolved": whole(best.tried - best.solved),
        "best_median": times_text(best.median_low, best.median_high),
        "best_worst": times_text(best.worst_low, best.worst_high),
        "best_ties": str(int(best.ties)),
        "greedy_median": times_text(greedy.median_low, greedy.median_high),
        "greedy_worst": times_text(greedy.worst_low, greedy.worst_high),
        "greedy_ties": str(int(greedy.ties)),
        "least": percent_text((optimum.least / optimum.single_pass).median()),
        "best_extra": percent_text(
            ((chosen.value - chosen.least) / chosen.single_pass).median(), 2
        ),
        "free": str(int((optimum.least == 0).sum())),
        "checkmate_unsolved": str(len(checkmate)),
        "checkmate_proofs": str(int((checkmate.status == NOT_APPLICABLE).sum())),
    }


def _of_solves() -> dict[str, str]:
    found = solves.solves()
    grid = solves.proved(found, "goal").set_index("goal").loc[1]
    able = found[(found.goal == 1) & ~found.infeasible]
    cases = load(CASES).set_index("name").seconds
    a72 = found[(found.goal == 4) & (found.device == "paper-a72")]
    return {
        "import": seconds_text(cases["import poetmodel"]),
        "help": seconds_text(cases["poetmodel --help"]),
        "scale_a72": seconds_text(a72.to_1.max()),
        "grid_proved": share_text(int(grid.within_1), int(grid.able)),
        "grid_able_proved": f"{int(grid.within_1)} of {int(grid.able)}",
        "grid_median": seconds_text(grid.median_s),
        "gurobi_fits": share_text(int(((able.columns_ <= 2000) & (able.rows_ <= 2000)).sum()),
                                  len(able)),
    }  # fmt: skip


def _of_training() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, kind in (("compiled", "training"), ("fused", "fused"), ("library", "library")):
        runs = steps.training(kind)
        own = runs[runs.own & runs.ran]
        found |= {
            f"{name}_ran": str(len(own)),
            f"{name}_networks": str(own.network.nunique()),
            f"{name}_within": str(int(own.within.sum())),
            f"{name}_equal": str(int(own.equal.sum())),
        }
        if name == "compiled":
            duels = steps.equal_peak(runs)
            found |= {f"{name}_won": str(int(duels.won.sum())), f"{name}_duels": str(len(duels))}
    fused = steps.equal_stock(steps.training("fused"))
    ratios = [own.processor / peer.processor for peer, own in steps.beside_peers()
              if own is not None and own.ran]  # fmt: skip
    return found | {
        "library_median": f"{statistics.median(ratios):.2f}",
        "library_best": f"{min(ratios):.2f}",
        "library_worst": f"{max(ratios):.2f}",
        "fused_median": f"{fused.ratio.median():.2f}",
        "fused_worst": f"{fused.ratio.max():.2f}",
    }


def _of_boards() -> dict[str, str]:
    runs = [run for run in steps.of_part("board") if run["trains"]]
    kept = {run["network"]: run for run in steps.of_part("keep-all") if run["trains"]}
    most = max(
        (run for run in runs if run["network"] in kept),
        key=lambda run: (
            kept[run["network"]]["ram_bytes"] / run["limit_bytes"],
            -run["instructions"],
        ),
    )
    nodes = steps.kernels()
    same = [run["state_sha256"] == kept[run["network"]]["state_sha256"] for run in runs]
    programs = [record["programs"] for record in records("aifes")]

    def aifes(field: str) -> str:
        times = [each["aifes"][field] / each["keep_all"][field] for each in programs]
        return f"{min(times):.1f} to {max(times):.1f}"

    shares = [row["ours"] / row["theirs"] for row in steps.cmsis_nn_rows()]
    return {
        "cmsis_least": f"{min(shares):.0%}".rstrip("%"),
        "cmsis_most": f"{max(shares):.0%}".rstrip("%"),
        "board_network": most["network"],
        "board": most["board"],
        "board_ram": format_bytes(most["limit_bytes"]),
        "board_kept": format_bytes(kept[most["network"]]["ram_bytes"]),
        "board_times": f"{most['instructions'] / kept[most['network']]['instructions']:.2f}",
        "board_same": f"{sum(same)} of {len(same)}",
        "kernels": f"{int((nodes.per_mac <= 12).sum())} of {len(nodes)}",
        "kernel_median": f"{statistics.median(nodes.per_mac):.2f}",
        "kernel_worst": f"{nodes.per_mac.max():.2f}",
        "aifes_instructions": aifes("instructions"),
        "aifes_ram": aifes("ram_bytes"),
        "models": whole(len(steps.models())),
        "models_work": whole(steps.models().works.sum()),
    }
