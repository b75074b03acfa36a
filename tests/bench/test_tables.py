"""Tables of results: their figures, from records; blocks, files and quotes of pages are current."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pandas")

import charts
import make_pages
import measured
import solve_tables as solves
import step_tables as steps
import tables
from measured import RESULTS, figures, markdown, percentile, times_text
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import InputShape, load_model
from poetmodel.graph.memory import inference_profile

if TYPE_CHECKING:
    from pathlib import Path

KIB, MEBI = 2**10, 2**20


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes records the newest ones of a kind."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)

    def write(kind: str, *found: dict[str, Any]) -> None:
        number = len(list(tmp_path.iterdir()))
        lines = (json.dumps({"kind": kind, "name": f"{n}", **r}) for n, r in enumerate(found))
        (tmp_path / f"{number}-{kind}.jsonl").write_text("\n".join(lines) + "\n")

    return write


# -- records and words -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_records_say_what_when_and_where(path: Path) -> None:
    """Each line has a kind, a name, a day, a machine and what was measured; no name is empty."""
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert record["name"]
        assert record["recorded"].startswith("2026-")
        assert {"cpu", "cores", "python", "versions"} <= record["machine"].keys()
        assert record["kind"] in ("startup", "build", "lora") or {"cell", "case"} & record.keys()


def test_newest_file_and_last_record_of_a_name_count(records: Any) -> None:
    """Fields of cells are columns; a measured field comes before one of the cell."""
    records("x", {"cell": {"ram": "1%"}})
    records("x", {"name": "a", "gap": 1}, {"name": "a", "cell": {"gap": 9, "ram": "2%"}, "gap": 2})
    found = measured.load("x")
    assert found[["name", "ram", "gap"]].to_numpy().tolist() == [["a", "2%", 2]]


def test_percentile_is_a_value_that_occurs() -> None:
    """The least one that so many do not exceed."""
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.95) == 2.0
    assert math.isnan(percentile([], 0.5))


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
def test_factors_are_numbers_or_ranges(low: float, high: float, text: str) -> None:
    """Two figures that are printed alike are one."""
    assert times_text(low, high) == text


def test_figures_are_set_to_the_right() -> None:
    """Words are not."""
    import pandas as pd

    frame = pd.DataFrame({"a": ["x"], "b": [0.5], "c": [1]})
    assert markdown(frame, {"b": measured.percent_text, "a": measured.code}).splitlines() == [
        "| b | a |",
        "| ---: | --- |",
        "| 50 % | `x` |",
    ]
    assert figures([("x", "1")], ("a", "b")).splitlines()[1] == "| --- | ---: |"


# -- methods ---------------------------------------------------------------------------------------


def method(name: str, overhead_j: float | None, **changes: Any) -> dict[str, Any]:
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


def optimum(overhead_j: float | None, bound_j: float, **changes: Any) -> dict[str, Any]:
    """Return the record of the optimum between two figures [J]."""
    gap = (overhead_j - bound_j) / overhead_j if overhead_j else 0.0
    return method("optimal", overhead_j, **{"overhead_bound": bound_j, "gap": gap} | changes)


def ratios(method_name: str) -> list[tuple[float, float]]:
    """Return the intervals of a method's overheads relative to the least."""
    runs = solves.overheads()
    found = runs[runs.method == method_name]
    return list(zip(found.low, found.high, strict=True))


def test_ratio_to_a_proved_optimum_is_a_number(records: Any) -> None:
    """What is proved to 1 % counts as the least."""
    records("compared", optimum(2.0, 1.99), method("dtr", 5.0))
    assert ratios("dtr") == [(2.5, 2.5)]


def test_ratio_without_a_proof_is_an_interval(records: Any) -> None:
    """The least lies between the bound and the best schedule of any method."""
    records("compared", optimum(2.0, 0.5), method("dtr", 1.0))
    assert ratios("optimal") == [(2.0, 4.0)]
    assert ratios("dtr") == [(1.0, 2.0)]
    assert solves.times_least(solves.overheads()).set_index("method").ties["optimal"] == 0


def test_ratio_to_nothing_is_one_or_infinite(records: Any) -> None:
    """Where the least overhead is 0, a method pays nothing too, or infinitely more."""
    records("compared", optimum(0.0, 0.0), method("dtr", 0.0), method("rotor", 1.0))
    assert (ratios("dtr"), ratios("rotor")) == ([(1.0, 1.0)], [(math.inf, math.inf)])


def test_best_of_the_earlier_heuristics_is_chosen_for_each_problem(records: Any) -> None:
    """Methods by a solver, the greedy start and own methods are not among them."""
    others = {"checkmate": 1.0, "greedy": 1.1, "mine.py:mine": 1.2, "dtr": 3.0, "rotor": None}
    found = [method(name, paid) for name, paid in others.items()]
    records("compared", optimum(1.0, 1.0), *found, method("dtr, own order", 2.0))
    assert ratios(solves.BEST) == [(2.0, 2.0)]


def test_rows_have_most_solved_first_and_the_optimum_before_all(records: Any) -> None:
    """A method that was not tried on a problem is not blamed for it."""
    records(
        "compared",
        optimum(1.0, 1.0),
        method("dtr", 2.0),
        method("rotor", 1.5),
        optimum(1.0, 1.0, ram="70%"),
        method("dtr", 4.0, ram="70%"),
        method("rotor", None, ram="70%"),
    )
    table = solves.times_least(solves.overheads())
    assert table.method.tolist() == ["optimal", "dtr", "rotor", solves.BEST]
    assert list(zip(table.solved, table.tried, strict=True)) == [(2, 2), (2, 2), (1, 2), (2, 2)]
    assert table[["median_low", "worst_low", "ties"]].iloc[1].tolist() == [3.0, 4.0, 0]


def test_problem_counts_once_the_optimum_is_on_record_and_something_solves_it(
    records: Any,
) -> None:
    """A run that was cut short, and a problem that nothing solves, are left out."""
    unsolved = (optimum(None, 1.0, ram="20%"), method("dtr", None, ram="20%"))
    records("compared", optimum(1.0, 1.0), method("dtr", 1.0, ram="30%"), *unsolved)
    assert solves.overheads().ram.unique().tolist() == ["50%"]


def test_schedule_that_the_published_program_began_with_is_not_its_own(records: Any) -> None:
    """It counts where its solver has a solution, which the gap of its model tells."""
    records("compared", optimum(1.0, 1.0), method("paper", 2.0), optimum(1.0, 1.0, ram="70%"),
            method("paper", 2.0, ram="70%", model_gap=0.5))  # fmt: skip
    table = solves.times_least(solves.overheads()).set_index("method")
    assert (table.solved["paper"], table.tried["paper"]) == (1, 2)


# -- solves ----------------------------------------------------------------------------------------


def solve(goal: int = 1, **changes: Any) -> dict[str, Any]:
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


def test_instances_count_with_their_time_unless_proved_infeasible(records: Any) -> None:
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
    found = solves.solves()
    assert found.ram.tolist() == ["10%", "20%", "30%", "40%", "40%"]
    table = solves.proved(found, "goal").set_index("goal")
    counts = table[["instances", "below", "infeasible", "able", "within_1"]].to_numpy().tolist()
    assert counts == [[4, 1, 1, 2, 1], [1, 0, 0, 1, 0]]
    assert (table.median_s[1], table.p95_s[1]) == (31.0, 60.0)
    assert math.isnan(table.median_to_1_s[1])
    assert found.to_1.dropna().tolist() == [1.0]
    assert set(found.columns_) == {500}


def test_solve_at_its_limit_has_its_gap() -> None:
    """In bold; what the verifier refuses is told."""
    assert solves.answer(solve()) == "2 s"
    late = solve(gap=0.05, seconds=60.0, violations=1)
    assert solves.answer(late) == "**60 s**, gap 5 %, rejected"
    assert solves.answer(solve(status="failed", reason="no licence")) == "too large for its licence"


# -- compiled steps --------------------------------------------------------------------------------


def run(name: str, time: float, peak_mebi: float, **changes: Any) -> dict[str, Any]:
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


def test_step_is_the_median_of_its_pairs_and_keeps_its_budget(records: Any) -> None:
    """Time and processor time over those of the reference beside it."""
    records("training", run("both", 1.5, 10), run("both", 1.5, 10, budget_bytes=MEBI))
    found = steps.training("training")
    assert found[["time", "processor"]].to_numpy().tolist() == [[1.5, 0.5]] * 2
    assert found.within.tolist() == [True, False]


def test_duel_is_with_the_best_peer_at_no_larger_peak(records: Any) -> None:
    """Eager is no peer; a compiled step with a larger peak does not count."""
    records(
        "training",
        run("eager", 1.0, 5),
        run("checkpoint", 1.5, 10),
        run("selective", 1.2, 20),
        run("both", 1.6, 9),
        run("both@selective", 1.1, 20),
    )
    duels = steps.equal_peak(steps.training("training"))
    assert duels[["peer", "own_time", "best_time", "won"]].to_numpy().tolist() == [
        ["checkpoint", 1.6, 1.5, False],
        ["selective", 1.1, 1.2, True],
    ]


# -- boards ----------------------------------------------------------------------------------------


def test_flash_of_the_board_has_the_last_word() -> None:
    """A program that exceeds it does not run; state that is read in place there needs commits."""
    program = {"part": "board", "status": "yes", "flash_bytes": 0, "written_bytes": 1}
    assert "needs `--commit`" in steps.fault_of_flash(program | {"board": "nano33ble"})
    assert steps.fault_of_flash(program | {"board": "nano33ble", "written_bytes": 0}) == ""
    large = program | {"board": "nrf52840", "flash_bytes": 2 * MEBI}
    assert (
        steps.fault_of_flash(large)
        == "program and first weights are 2.00 MiB, and the flash has 1.00 MiB"
    )
    fault = {"status": "yes", "fault": steps.fault_of_flash(large), "trains": False, "tile": None}
    assert steps.verdict(fault) == "no: flash"
    assert steps.verdict(fault | {"fault": "", "trains": True, "tile": "8KiB"}) == "yes, 8KiB"
    assert steps.verdict(None) == "-"


def test_refusal_names_the_node_that_needs_most() -> None:
    """With what inputs, stack and runtime leave."""
    floor = {"floor_node": "fc", "floor_op": "mm", "floor_bytes": 300 * KIB}
    last = {**floor, "reserved_bytes": 6 * KIB, "reason": ""}
    refused = {"trains": False, "fault": "", "status": "no", "limit_bytes": 256 * KIB}
    assert steps.refusal(refused | {"tried": [last]}) == (
        "inputs, stack and runtime leave 250.00 KiB, and `fc` (mm) alone needs 300.00 KiB"
    )
    early = [{"reason": "proved: there is no room"}]
    assert steps.refusal(refused | {"tried": early}) == "there is no room"


# -- pages -----------------------------------------------------------------------------------------


def test_blocks_are_filled_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time changes nothing; a table that there is not is an error."""
    monkeypatch.setattr(make_pages, "TABLES", {"x": lambda: "| a |"})
    page = "words\n<!-- begin table x -->\nold\n<!-- end table -->\nmore\n"
    filled = make_pages.filled(page)
    assert filled == "words\n<!-- begin table x -->\n\n| a |\n\n<!-- end table -->\nmore\n"
    assert make_pages.filled(filled) == filled
    with pytest.raises(KeyError, match="y"):
        make_pages.filled(page.replace("table x", "table y"))


def test_tables_of_pages_are_used_and_short() -> None:
    """Each table is on a page, the README included, and has at most 25 rows."""
    texts = [path.read_text("utf-8") for path in make_pages.DOCS.rglob("*.md")]
    pages = (make_pages.ROOT / "README.md").read_text("utf-8") + "".join(texts)
    assert [name for name in tables.TABLES if f"<!-- begin table {name} -->" not in pages] == []
    assert [name for name, make in tables.TABLES.items() if make().count("\n") > 26] == []
    assert [name for name in tables.CSVS if f"csv/{name}.csv" not in pages] == []


def test_stale_parts_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page, a picture and a quoted number that are stale are named, and nothing is written."""
    page = tmp_path / "index.md"
    page.write_text("<!-- begin table x -->\n<!-- end table -->\nof 9 problems\n")
    (tmp_path / "README.md").write_text("")
    chart = charts.Chart(shown=[1], paint=print)
    for name, value in {
        "ROOT": tmp_path,
        "DOCS": tmp_path,
        "TABLES": {"x": lambda: "| a |"},
        "CSVS": {},
        "CHARTS": {"c.svg": lambda: chart},
        "QUOTES": (("index.md", "of {problems}\nproblems"),),
        "claims": lambda: {"problems": "8"},
    }.items():
        monkeypatch.setattr(make_pages, name, value)
    assert make_pages.main(["--check"]) == 1
    said = capsys.readouterr().out.splitlines()
    lacks = "index.md lacks: of 8 problems"
    assert said == [f"stale {page}", f"stale {tmp_path / 'c.svg'}", lacks]
    assert "| a |" not in page.read_text()
    (tmp_path / "c.svg").write_text(f"data {chart.digest}")
    page.write_text(make_pages.filled(page.read_text()).replace("9", "8"))
    assert make_pages.main(["--check"]) == 0


def test_chart_is_drawn_with_all_digits_of_its_ticks(records: Any, tmp_path: Path) -> None:
    """Small overheads have ticks of their own; the same chart gives the same bytes."""
    pytest.importorskip("matplotlib")
    kind, model, device = charts.CURVES[0]
    place = {"kind": kind, "model": model, "device": device}
    curve = [("50%", 500, 1e-3), ("70%", 700, 1e-5)]
    found = [optimum(e, e, ram=ram, ram_budget_bytes=b, **place) for ram, b, e in curve]
    rotor = [method("rotor", 2 * e, ram=ram, ram_budget_bytes=b, **place) for ram, b, e in curve]
    records("compared", *found, *rotor)
    chart, file = charts.compared(), tmp_path / "chart.svg"
    (panel,) = chart.shown.values()
    assert panel["lines"]["rotor"] == [[50.0, pytest.approx(0.2)], [70.0, pytest.approx(0.002)]]
    assert not chart.current(file)
    chart.write(file)
    first = file.read_text("utf-8")
    assert chart.current(file)
    assert all(f">{tick} %<" in first for tick in ("0.001", "0.01", "0.1"))
    chart.write(file)
    assert file.read_text("utf-8") == first


def test_networks_of_the_picture_are_on_record_over_budgets() -> None:
    """Each kind has one, with four budgets or more."""
    runs = solves.overheads()
    assert {kind for kind, *_ in charts.CURVES} == set(runs.kind)
    for kind, model, device in charts.CURVES:
        found = runs[(runs.kind == kind) & (runs.model == model) & (runs.device == device)]
        assert found.ram.nunique() >= 4


def test_memory_of_inference_is_that_of_the_page() -> None:
    """Training takes 8.9 times the RAM of inference; 23 samples take 200 times that of one."""
    text = (make_pages.DOCS / "results" / "paper.md").read_text("utf-8")
    graphs = [load_model("resnet50", InputShape(batch=batch)) for batch in (1, 23)]
    training = [checkpoint_all_peak_bytes(graph) for graph in graphs]
    inference = [max((inference_profile(graph) or {}).values()) for graph in graphs]
    assert f"{training[0] / inference[0]:.1f} times" in text
    assert f"{training[0] / MEBI:.1f} MiB with everything kept" in text
    assert f"{inference[0] / MEBI:.2f} MiB for the forward pass" in text
    assert training[1] / inference[0] == pytest.approx(204, abs=1)
    assert training[1] / inference[1] == pytest.approx(training[0] / inference[0], rel=0.01)
