"""Tables of results: their figures, from records; blocks, files and quotes of pages are current."""

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import test_solvers
from blocks import update_pages
from kit.figure_rows import make_row
from solver_tables import tabulate_solvers

pytest.importorskip("pandas")

import charts
import make_pages
import measured
import solve_tables as solves
import step_tables as steps
import tables
from measured import RESULTS, format_factors
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import InputShape, load_model
from poetmodel.graph.memory import inference_profile

KIB, MEBI = 2**10, 2**20


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Return a function that makes records the newest ones of a kind."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)

    def write(kind, *found):
        day = f"2026-01-{1 + len(list(tmp_path.iterdir())):02}"
        lines = (json.dumps({"kind": kind, "name": f"{n}", **r}) for n, r in enumerate(found))
        (tmp_path / f"{day}-{kind}.jsonl").write_text("\n".join(lines) + "\n")

    return write


# -- records and words -----------------------------------------------------------------------------
def test_kind_is_the_whole_name_after_the_day(records):
    """Records of a kind are in ``DATE-KIND.jsonl``, not in a file with the same ending."""
    records("grid", {"gap": 1})
    records("old-grid", {"gap": 2})
    assert [record["gap"] for record in measured.read_records("grid")] == [1]
    assert measured.read_records("rid") == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_records_say_what_when_and_where(path):
    """Each line has a kind, a nonempty name, a day, a machine and measurements."""
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert record["name"]
        assert record["recorded"].startswith("2026-")
        assert {"cpu", "cores", "python", "versions"} <= record["machine"].keys()
        assert record["kind"] in ("startup", "build", "lora") or {"cell", "case"} & record.keys()


def test_newest_file_and_last_record_of_a_name_count(records):
    """Fields of cells are columns; a measured field precedes one of the cell."""
    records("x", {"cell": {"ram": "1%"}})
    records("x", {"name": "a", "gap": 1}, {"name": "a", "cell": {"gap": 9, "ram": "2%"}, "gap": 2})
    found = measured.load_frame("x")
    assert found[["name", "ram", "gap"]].to_numpy().tolist() == [["a", "2%", 2]]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.0, 1.0, "1.00"),
        (1.0, 12.34, "1.00 to 12.3"),
        (2.0, math.inf, "at least 2.00"),
        (math.inf, math.inf, "∞"),
        (math.nan, math.nan, "-"),
        (1234.5, 1234.5, "1,234"),
    ],
)
def test_factors_are_numbers_or_ranges(low, high, text):
    """Two figures that are printed alike are one."""
    assert format_factors(low, high) == text


# -- methods ---------------------------------------------------------------------------------------
def method(name, overhead_j, **changes):
    """Return the record of a method on a problem whose single pass takes 1 J."""
    places = {"kind": "published", "model": "m", "device": "d", "ram": "50%"}
    cell = {field: changes.pop(field, value) for field, value in places.items()}
    found = {
        "cell": cell | {"method": name},
        "seconds": 0.5,
        "cpu_s": 0.25,
        "status": "not-applicable" if overhead_j is None else "feasible",
        "baseline": 1.0,
        "baseline_energy_j": 1.0,
        "overhead": overhead_j,
        "overhead_j": overhead_j,
        "overhead_bound": 0.0,
        "overhead_bound_j": 0.0,
        "gap": None if overhead_j is None else 1.0,
        "model_gap": None,
        "keep_all_bytes": 1000,
        "ram_budget_bytes": 500,
        "graph_nodes": 8,
    }
    return found | changes


def optimum(overhead_j, bound_j, **changes):
    """Return the record of the optimum between two figures [J]."""
    gap = (overhead_j - bound_j) / overhead_j if overhead_j else 0.0
    return method("optimal", overhead_j, **{"overhead_bound": bound_j, "gap": gap} | changes)


def ratios(method_name):
    """Return the intervals of a method's overheads relative to the least."""
    runs = solves.load_overheads()
    found = runs[runs.method == method_name]
    return list(zip(found.low, found.high, strict=True))


def test_ratio_without_a_proof_is_an_interval(records):
    """The minimum is between the bound and the best of any method; if it is 0, so is the bound."""
    records("compared", optimum(2.0, 0.5), method("dtr", 1.0))
    assert ratios("optimal") == [(2.0, 4.0)]
    assert ratios("dtr") == [(1.0, 2.0)]
    assert (
        solves.summarize_methods(solves.load_overheads()).set_index("method").ties["optimal"] == 0
    )
    records("compared", optimum(2.0, 1.99), method("dtr", 5.0))
    assert ratios("dtr") == [(2.5, 2.5)]
    records("compared", optimum(0.0, 0.0), method("dtr", 0.0), method("rotor", 1.0))
    assert (ratios("dtr"), ratios("rotor")) == ([(1.0, 1.0)], [(math.inf, math.inf)])


def test_best_of_the_earlier_heuristics_is_chosen_for_each_problem(records):
    """Methods by a solver, the greedy start and own methods are not among them."""
    others = {"checkmate": 1.0, "greedy": 1.1, "mine.py:mine": 1.2, "dtr": 3.0, "rotor": None}
    found = [method(name, paid) for name, paid in others.items()]
    records("compared", optimum(1.0, 1.0), *found, method("dtr, own order", 2.0))
    assert ratios(solves.BEST) == [(2.0, 2.0)]


def test_rows_have_most_solved_first_and_the_optimum_before_all(records):
    """A method that was not tried on a problem is not blamed for it."""
    records("compared", optimum(1.0, 1.0), method("dtr", 2.0), method("rotor", 1.5),
            optimum(1.0, 1.0, ram="70%"), method("dtr", 4.0, ram="70%"),
            method("rotor", None, ram="70%"))  # fmt: skip
    table = solves.summarize_methods(solves.load_overheads())
    assert table.method.tolist() == ["optimal", "dtr", "rotor", solves.BEST]
    assert list(zip(table.solved, table.tried, strict=True)) == [(2, 2), (2, 2), (1, 2), (2, 2)]
    assert table[["median_low", "worst_low", "ties"]].iloc[1].tolist() == [3.0, 4.0, 0]


def test_distribution_counts_problems_by_factors_of_the_least(records):
    """Counts are of all problems up to a factor; then those beyond all, and the unsolved."""
    records("compared", optimum(1.0, 1.0), method("capuchin", 1.2),
            optimum(1.0, 1.0, ram="70%"), method("capuchin", 30.0, ram="70%"),
            optimum(1.0, 1.0, ram="80%"), method("capuchin", None, ram="80%"))  # fmt: skip
    lines = solves.tabulate_distribution().splitlines()
    assert lines[0].startswith("| method | up to 1.001 | up to 1.05 | up to 1.1 | up to 1.25 |")
    assert "| `optimal` | 3 | 3 | 3 | 3 | 3 | 3 | 3 | 0 | 0 |" in lines
    assert "| `capuchin` | 0 | 0 | 0 | 1 | 1 | 1 | 1 | 1 | 1 |" in lines


def test_what_does_not_count(records):
    """Interrupted runs, and problems without any schedule, are omitted.

    A schedule that the published program started with is not counted as its own; it counts if
    the solver has a solution, as the gap of its model shows.
    """
    unsolved = (optimum(None, 1.0, ram="20%"), method("dtr", None, ram="20%"))
    records("compared", optimum(1.0, 1.0), method("dtr", 1.0, ram="30%"), *unsolved)
    assert solves.load_overheads().ram.unique().tolist() == ["50%"]
    records("compared", optimum(1.0, 1.0), method("paper", 2.0), optimum(1.0, 1.0, ram="70%"),
            method("paper", 2.0, ram="70%", model_gap=0.5))  # fmt: skip
    table = solves.summarize_methods(solves.load_overheads()).set_index("method")
    assert (table.solved["paper"], table.tried["paper"]) == (1, 2)


# -- solves ----------------------------------------------------------------------------------------
def solve(goal=1, **changes):
    """Return the record of an instance that was proved in two seconds."""
    places = {"model": "m", "device": "d", "ram": "40%", "deadline": None, "method": "default"}
    cell = {"goal": goal} | {name: changes.pop(name, value) for name, value in places.items()}
    found = {
        "cell": cell,
        "seconds": 2.0,
        "status": "optimal",
        "gap": 0.0,
        "requested_gap": 1e-4,
        "gaps": [[0.5, 0.4], [1.0, 0.009], [2.0, 0.0]],
        "overhead_j": 0.01,
        "baseline_energy_j": 1.0,
        "ram_budget_bytes": 100,
        "floor_bytes": 50,
        "peak_memory_bytes": MEBI,
        "worker_memory_bytes": 0,
        "violations": 0,
        "statistics": {"columns": 300, "max_columns": 500, "rows": 400},
    }
    return found | changes


def test_instances_count_with_their_time_unless_proved_infeasible(records):
    """Those without a schedule stay in; budgets below the minimum RAM are counted apart."""
    nothing = {"gap": None, "overhead_j": None, "gaps": []}
    records(
        "grid",
        solve(),
        solve(ram="30%", status="unknown", seconds=60.0, **nothing),
        solve(ram="20%", status="infeasible", **nothing),
        solve(ram="10%", status="infeasible", ram_budget_bytes=40, **nothing),
        solve(6, ram="99%"),
    )
    records("captures", solve(6, gap=0.02, gaps=[]))
    found = solves.load_solves()
    assert found.ram.tolist() == ["10%", "20%", "30%", "40%", "40%"]
    table = solves.count_proofs(found, "goal").set_index("goal")
    counts = table[["instances", "below", "infeasible", "able", "within_1"]].to_numpy().tolist()
    assert counts == [[4, 1, 1, 2, 1], [1, 0, 0, 1, 0]]
    assert (table.median_s[1], table.p95_s[1]) == (31.0, 60.0)
    assert math.isnan(table.median_to_1_s[1])
    assert found.to_1.dropna().tolist() == [1.0]
    assert set(found.columns_) == {500}


# -- compiled steps --------------------------------------------------------------------------------
def run(name, time, peak_mebi, **changes):
    """Return the record of a method whose second step of three was slow."""
    cell = {"network": "n", "method": name, "share": None, "slack": changes.pop("slack", 0.0)}
    found = {
        "cell": cell,
        "heap_peak_bytes": peak_mebi * MEBI,
        "budget_bytes": peak_mebi * MEBI,
        "pairs": [[time, 1.0, 1.0, 2.0], [9.0, 1.0, 1.0, 2.0], [time, 1.0, 1.0, 2.0]],
        "equal": True,
    }
    return found | changes


def test_step_is_the_median_of_its_pairs_and_keeps_its_budget(records):
    """Time and processor time over those of the reference beside it."""
    records("training", run("both", 1.5, 10), run("both", 1.5, 10, budget_bytes=MEBI))
    found = steps.load_training("training")
    assert found[["time", "processor"]].to_numpy().tolist() == [[1.5, 0.5]] * 2
    assert found.within.tolist() == [True, False]


def test_duel_is_with_the_best_peer_at_no_larger_peak(records):
    """Eager is no peer; a compiled step with a larger peak does not count."""
    records(
        "training",
        run("eager", 1.0, 5),
        run("checkpoint", 1.5, 10),
        run("selective", 1.2, 20),
        run("both", 1.6, 9),
        run("both@selective", 1.1, 20),
    )
    duels = steps.compare_at_equal_peak(steps.load_training("training"))
    assert duels[["peer", "own_time", "best_time", "won"]].to_numpy().tolist() == [
        ["checkpoint", 1.6, 1.5, False],
        ["selective", 1.1, 1.2, True],
    ]


# -- boards ----------------------------------------------------------------------------------------
def test_flash_of_the_board_has_the_last_word():
    """A program above the flash does not run; state that is read in place there needs commits.

    A refusal names the node with the maximum, and the RAM that inputs, stack and runtime leave.
    """
    program = {"part": "board", "status": "yes", "flash_bytes": 0, "written_bytes": 1}
    assert "needs `--commit`" in steps.describe_flash_fault(program | {"board": "nano33ble"})
    assert steps.describe_flash_fault(program | {"board": "nano33ble", "written_bytes": 0}) == ""
    large = program | {"board": "nrf52840", "flash_bytes": 2 * MEBI}
    assert (
        steps.describe_flash_fault(large)
        == "program and first weights are 2.00 MiB, and the flash has 1.00 MiB"
    )
    fault = {
        "status": "yes",
        "fault": steps.describe_flash_fault(large),
        "trains": False,
        "tile": None,
    }
    assert steps.format_verdict(fault) == "no: flash"
    refused_export = {"status": "no", "fault": "", "trains": False, "reason": "flash: code 1 B"}
    assert steps.format_verdict(refused_export) == "no: flash"
    assert (
        steps.format_verdict(fault | {"fault": "", "trains": True, "tile": "8KiB"}) == "yes, 8KiB"
    )
    assert steps.format_verdict(None) == "-"
    floor = {"floor_node": "fc", "floor_op": "mm", "floor_bytes": 300 * KIB}
    last = {**floor, "reserved_bytes": 6 * KIB, "reason": ""}
    refused = {"trains": False, "fault": "", "status": "no", "limit_bytes": 256 * KIB}
    assert steps.describe_refusal(refused | {"tried": [last]}) == (
        "inputs, stack and runtime leave 250.00 KiB, and `fc` (mm) alone needs 300.00 KiB"
    )
    early = [{"reason": "proved: there is no room"}]
    assert steps.describe_refusal(refused | {"tried": early}) == "there is no room"


# -- pages -----------------------------------------------------------------------------------------
def test_blocks_are_filled_and_nothing_else(monkeypatch):
    """A second update has no effect; an unknown table is an error."""
    monkeypatch.setattr(make_pages, "TABLES", {"x": lambda: "| a |"})
    page = "words\n<!-- begin table x -->\nold\n<!-- end table -->\nmore\n"
    filled = make_pages.fill_tables(page)
    assert filled == "words\n<!-- begin table x -->\n\n| a |\n\n<!-- end table -->\nmore\n"
    assert make_pages.fill_tables(filled) == filled
    with pytest.raises(KeyError, match="y"):
        make_pages.fill_tables(page.replace("table x", "table y"))


def test_tables_of_pages_are_current_used_and_short(monkeypatch):
    """Each table is on a page, the README included, as due, and has at most 25 rows."""
    for name in ("load_overheads", "load_solves"):  # each for several tables
        monkeypatch.setattr(solves, name, cache(getattr(solves, name)))
    made = {name: make() for name, make in tables.TABLES.items()}
    monkeypatch.setattr(make_pages, "TABLES", {n: lambda text=t: text for n, t in made.items()})
    assert update_pages(make_pages.render_files(), check=True) == 0
    texts = [path.read_text("utf-8") for path in make_pages.DOCS.rglob("*.md")]
    pages = (make_pages.ROOT / "README.md").read_text("utf-8") + "".join(texts)
    assert [name for name in tables.TABLES if f"<!-- begin table {name} -->" not in pages] == []
    assert [name for name, text in made.items() if text.count("\n") > 26] == []
    assert [name for name in tables.CSVS if f"csv/{name}.csv" not in pages] == []


def test_charts_are_current():
    """Pictures are those of the newest records."""
    assert make_pages.update_charts(check=True) == 0


def test_numbers_are_filled_between_their_marks():
    """Other text stays; an unknown number is an error. No mark of a page begins a line."""
    page = "of <!--=n-->9\nor 10<!--/--> and <!--=n-->9<!--/-->.\n"
    filled = "of <!--=n-->8<!--/--> and <!--=n-->8<!--/-->.\n"
    assert make_pages.fill_numbers(page, {"n": "8"}) == filled
    with pytest.raises(KeyError, match="n"):
        make_pages.fill_numbers(page, {})
    for path in make_pages.DOCS.rglob("*.md"):
        assert "\n<!--=" not in path.read_text("utf-8"), path


def test_stale_parts_are_noticed(monkeypatch, tmp_path, capsys):
    """A stale page or picture is named, and nothing is written; so is a page's number."""
    page = tmp_path / "index.md"
    page.write_text("<!-- begin table x -->\n<!-- end table -->\n")
    quoting = tmp_path / "quoting.md"
    quoting.write_text("of <!--=problems-->9<!--/--> problems\n")
    (tmp_path / "README.md").write_text("")
    chart = charts.Chart(shown=[1], paint=print)
    for name, value in {
        "ROOT": tmp_path,
        "DOCS": tmp_path,
        "TABLES": {"x": lambda: "| a |"},
        "CSVS": {},
        "CHARTS": {"c.svg": lambda: chart},
        "compute_quoted_numbers": lambda: {"problems": "8"},
    }.items():
        monkeypatch.setattr(make_pages, name, value)
    assert make_pages.main(["--check"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == [f"stale {path}" for path in (tmp_path / "c.svg", page, quoting)]
    assert "| a |" not in page.read_text()
    (tmp_path / "c.svg").write_text(f"data {chart.digest}")
    page.write_text(make_pages.fill_tables(page.read_text()))
    quoting.write_text(quoting.read_text().replace("9", "8"))
    assert make_pages.main(["--check"]) == 0


def test_chart_is_drawn_with_all_digits_of_its_ticks(records, tmp_path):
    """Small overheads have ticks of their own; the same chart has the same bytes."""
    pytest.importorskip("matplotlib")
    kind, model, device = charts.CURVES[0]
    place = {"kind": kind, "model": model, "device": device}
    curve = [("50%", 500, 1e-3), ("70%", 700, 1e-5)]
    found = [optimum(e, e, ram=ram, ram_budget_bytes=b, **place) for ram, b, e in curve]
    rotor = [method("rotor", 2 * e, ram=ram, ram_budget_bytes=b, **place) for ram, b, e in curve]
    records("compared", *found, *rotor)
    chart, file = charts.make_methods_chart(), tmp_path / "chart.svg"
    (panel,) = chart.shown.values()
    assert panel["lines"]["rotor"] == [[50.0, pytest.approx(0.2)], [70.0, pytest.approx(0.002)]]
    assert not chart.is_current(file)
    chart.write(file)
    first = file.read_text("utf-8")
    assert chart.is_current(file)
    assert all(f">{tick} %<" in first for tick in ("0.001", "0.01", "0.1"))
    chart.write(file)
    assert file.read_text("utf-8") == first


def test_memory_of_inference_is_that_of_the_page():
    """Training needs 8.9 times the RAM of inference; 23 samples need 200 times that of one."""
    text = (make_pages.DOCS / "results" / "paper.md").read_text("utf-8")
    graphs = [load_model("resnet50", InputShape(batch=batch)) for batch in (1, 23)]
    training = [checkpoint_all_peak_bytes(graph) for graph in graphs]
    inference = [max((inference_profile(graph) or {}).values()) for graph in graphs]
    assert f"{training[0] / inference[0]:.1f} times" in text
    assert f"{training[0] / MEBI:.1f} MiB with everything kept" in text
    assert f"{inference[0] / MEBI:.2f} MiB for the forward pass" in text
    assert training[1] / inference[0] == pytest.approx(204, abs=1)
    assert training[1] / inference[1] == pytest.approx(training[0] / inference[0], rel=0.01)


# -- the comparison of solvers ---------------------------------------------------------------------
ROOT = Path(__file__).resolve().parents[2]
HEADS = ["solver", "formulation", "limit", "status", "objective", "bound", "gap", "time"]


@pytest.mark.slow
def test_run_ends_with_a_table_for_each_problem():
    """Each problem has its title and heads, each run a line with status and figures."""
    options = ("--benchmark-only", "--smoke", "-k", "solvers", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", "bench", *options)
    # In a worker of pytest-xdist, benchmarks would be off in this run too.
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    tables = [place for place, line in enumerate(lines) if line.split() == HEADS]
    runs = test_solvers.select_runs(smoke=True)
    problems = dict.fromkeys((run.model, run.device) for run in runs)
    assert len(tables) == len(problems)
    for place, (model, device) in zip(tables, problems, strict=True):
        assert f"{model} on {device}" in lines[place - 1]
        mine = [run for run in runs if (run.model, run.device) == (model, device)]
        rows = [line.split() for line in lines[place + 1 : place + 1 + len(mine)]]
        assert [row[:2] for row in rows] == [[run.backend, run.formulation] for run in mine]
        assert all("optimal" in row for row in rows if row[:2] == ["highs", "compact"])


@pytest.mark.parametrize(
    ("status", "words"), [("refused", "refused by the licence"), ("not-installed", "not installed")]
)
def test_refused_runs_have_no_figures(status, words):
    """Runs that the licence refuses, or whose solver is not installed, have only a reason."""
    refused = make_row(
        formulation="compact", backend="gurobi", status=status, termination=None, gap=0.0
    )
    (table,) = tabulate_solvers([refused])
    assert table.rows[0][3:] == (words, "-", "-", "-", "-")


def test_comparison_tells_what_each_solver_reached():
    """Objective, bound and gap of the problem, for ``paper`` of its own model; time-outs stay."""
    timed = {"termination": "time_limit", "status": "feasible", "time_limit_s": 10.0}
    found = [
        make_row(backend="highs", formulation="compact"),
        make_row(backend="scip", formulation="compact", gap=0.25, overhead_bound_j=0.75, **timed),
        make_row(
            backend="highs",
            formulation="paper",
            status="feasible",
            gap=1.0,
            model_value=0.5,
            model_bound=0.5,
            model_gap=0.0,
            violations=2,
        ),
        make_row(backend="scip", formulation="paper", gap=1.0, model_bound=0.1, **timed),
        make_row(backend="gurobi", formulation="compact", gap=1.0, **{**timed, "solve_s": 0.0}),
    ]
    (table,) = tabulate_solvers(found)
    assert table.title == "m on d, 50% of RAM"
    assert table.heads[3:] == ("status", "objective", "bound", "gap", "time")
    assert [line[3:] for line in table.rows] == [
        ("optimal", "1 J", "1 J", "0 %", "2 s"),
        ("feasible, time limit", "1 J", "750 mJ", "25 %", "2 s"),
        ("feasible, rejected by the verifier", "500 mJ", "500 mJ", "0 %", "2 s"),
        ("unknown, time limit", "-", "100 mJ", "none in time", "2 s"),
        ("feasible, time limit while building", "1 J", "1 J", "none in time", "2 s"),
    ]


def test_times_of_boards_are_by_the_cycles_of_their_cores():
    """Instructions a cycle and the clock are those of the device, as in estimates."""
    run = {"instructions": 79_000_000, "clock_hz": 1.0}
    assert steps.compute_core_time_s(run, "nrf52840") == pytest.approx(100e6 / 64e6)
    assert steps.compute_core_time_s(run, "rp2350") == pytest.approx(79e6 / 150e6)
    assert steps.compute_core_time_s(run, "stm32f746") == pytest.approx(79e6 / 1.05 / 216e6)
    with pytest.raises(ValueError, match="mkr1000"):
        steps.compute_core_time_s(run, "mkr1000")
