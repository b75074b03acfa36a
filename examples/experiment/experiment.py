"""A paper's experiment: sweep methods on Dask, prove a front, check it by a second solver."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from distributed import Client, LocalCluster

import poetmodel as pm
from poetmodel.backends import register
from poetmodel.problem.io import load_constraints
from poetmodel.sweeps import Settings, grid, sweep, tables

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from solver import Milp  # noqa: E402

MODEL, BOARD, WEAR = "vgg16-cifar", str(HERE / "board.toml"), HERE / "wear.toml"
OWN = f"{HERE / 'methods.py'}:costliest"
BUDGETS = ("60%", "70%", "80%", "90%", "100%")
LABELS = {"optimal": "poetmodel", "rotor": "rotor", "methods.py:costliest": "costliest (ours)"}


def sweep_on_dask(folder: Path) -> list[dict]:
    """Solve each method and budget on a Dask cluster; finished runs are not repeated."""
    settings = Settings(constraints=WEAR.read_text(), time_limit_s=30, gap=0.01)
    runs = grid([MODEL], [BOARD], ram=BUDGETS, methods=["optimal", "rotor", OWN], settings=settings)
    with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        return tables.rows(sweep(runs, folder, scheduler=client.scheduler.address))


def write_table(rows: list[dict], path: Path) -> None:
    """Write overhead, proven bound and gap of each run as a table in Markdown."""
    lines = ["| method | RAM | overhead | proven bound | gap |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        overhead, bound = row["overhead_j"], row["axis_bound_j"]
        cells = ["-"] * 3
        if overhead is not None:
            cells[0] = f"{1e3 * overhead:.3f} mJ"
        if row["method"] == "optimal" and bound is not None:
            cells[1:] = f"{1e3 * bound:.3f} mJ", f"{row['axis_gap']:.1%}"
        label = LABELS.get(Path(row["method"]).name, row["method"])
        lines.append(f"| {label} | {row['ram']} | {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


def draw_front(rows: list[dict], path: Path) -> None:
    """Draw overhead against RAM; bounds prove that no schedule is in the shaded area.

    A schedule also fits more RAM, and a bound also holds for less.
    """
    _, axes = plt.subplots(figsize=(6, 3.5))
    for method in dict.fromkeys(row["method"] for row in rows):
        solved = [row for row in rows if row["method"] == method and row["overhead_j"] is not None]
        ram = [row["ram_budget_bytes"] / 1024 for row in solved]
        overheads = [1e3 * row["overhead_j"] for row in solved]
        axes.step(ram, overheads, "o-", where="post", label=LABELS.get(Path(method).name, method))
        if method == "optimal":
            bounds = [1e3 * row["axis_bound_j"] for row in solved]
            axes.fill_between(ram, bounds, step="pre", color="0.85", label="proved impossible")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set(xlabel="RAM [KiB]", ylabel="energy beyond a single pass [mJ]")
    axes.legend(frameon=False)
    plt.savefig(path, bbox_inches="tight")


def check_by_second_solver() -> str:
    """Solve a smaller problem with the same constraint by HiGHS and by SciPy; they agree."""
    register(Milp)
    graph = pm.zoo.mlp()
    problem = pm.Problem(graph, pm.Costs.estimate(graph, pm.Device.load(BOARD)), ram="70%")
    problem = load_constraints(WEAR, problem)
    results = [pm.solve(problem, backend=name, formulation="compact") for name in ("highs", "milp")]
    return "\n".join(f"{result.backend}: {result.summary()}" for result in results)


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    table_rows = sweep_on_dask(out)
    write_table(table_rows, out / "table.md")
    draw_front(table_rows, out / "front.svg")
    print((out / "table.md").read_text())
    print(check_by_second_solver())
