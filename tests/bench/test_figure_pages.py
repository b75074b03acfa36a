"""The page of the paper's figures says what the kept records say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import make_results
from kit.figure_rows import row, without
from kit.measured_records import CIRCUMSTANCES, in_folder, write_records
from poetmodel.bench.figures import FIGURES
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import InputShape, load_model
from poetmodel.graph.memory import inference_profile
from result_pages import figures

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = make_results.RESULTS / "figures"


@pytest.mark.slow
def test_page_and_pictures_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody edited a generated part; every figure has its block and its records."""
    assert make_results.main(["--check"]) == 0, capsys.readouterr().out
    assert [name for name in FIGURES if not figures.read(RECORDS, name)] == []


def test_stale_parts_are_noticed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed record makes page and picture stale; writing them makes both current."""
    pytest.importorskip("matplotlib")
    records: list[dict[str, Any]] = figures.read(RECORDS, "figure5")
    in_folder(tmp_path, monkeypatch)
    page = tmp_path / "paper-figures.md"
    kept = tmp_path / "figures"
    kept.mkdir()
    write_records(kept, "figure5", *records)
    assert make_results.main(["--check"]) == 1
    assert make_results.main([]) == 0
    assert (tmp_path / "paper-figure5.svg").exists()
    text = page.read_text()
    assert text.startswith("words\n")
    assert figures.NOTHING_YET in text
    capsys.readouterr()
    assert make_results.main(["--check"]) == 0
    assert capsys.readouterr().out == ""
    found = next(record for record in records if record["status"] == "optimal")
    found["result"]["overhead_j"] *= 2
    write_records(kept, "figure5", *records)
    assert make_results.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "stale" in said
    assert "paper-figure5.svg" in said


def test_readme_has_a_line_for_each_problem_and_formulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell says the time to the proof, what the longest limit left, or why there is nothing."""
    found = [
        row() | {"backend": solver, "formulation": "compact", "time_limit_s": limit} | ended
        for limit in (10.0, 60.0)
        for solver, ended in {
            "highs": {"seconds": limit / 5},
            "scip": {"seconds": limit, "gap": 0.25, "status": "feasible"},
            "gurobi": {"status": "refused", "overhead_j": None, "overhead_bound_j": None},
        }.items()
    ]
    late = without("unknown", backend="highs", formulation="paper", time_limit_s=60.0)
    monkeypatch.setattr(figures, "read", lambda *_: [CIRCUMSTANCES])
    monkeypatch.setattr(figures, "rows", lambda _: [*found, late | {"termination": "time_limit"}])
    lines = figures.readme_solvers(tmp_path).splitlines()
    kind = "`m` on d, 50% of RAM"
    assert lines[2:4] == [
        f"| {kind} | `compact` | 12 s | gap 25 % after 60 s | refused by the licence |",
        f"| {kind} | `paper` | no solution in 2 s | - | - |",
    ]


def test_memory_of_inference_is_that_of_the_page() -> None:
    """Training takes 8.9 times the RAM of inference; 23 samples take 204 times that of one."""
    text = make_results.FIGURES_PAGE.read_text()
    graphs = [load_model("resnet50", InputShape(batch=batch)) for batch in (1, 23)]
    training = [checkpoint_all_peak_bytes(graph) for graph in graphs]
    inference = [max((inference_profile(graph) or {}).values()) for graph in graphs]
    assert f"shows {training[0] / inference[0]:.1f} times" in text
    assert f"{training[0] / 2**20:.1f} MiB where everything is kept" in text
    assert f"against {inference[0] / 2**20:.2f} MiB" in text
    assert f"a step of 23 samples takes {training[1] / inference[0]:.0f} times" in text
    assert training[1] / inference[1] == pytest.approx(training[0] / inference[0], rel=0.01)
