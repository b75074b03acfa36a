"""What the page of results says of whole steps is what the records say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import make_results
from kit.measured_records import CIRCUMSTANCES, in_folder, write_records
from result_pages import charts
from result_pages.training import TrainingRecord, duels
from result_pages.training import whole_section as section

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told

MEBI = 2**20


def record(method: str = "both", optimizer: str = "adamw", **changes: Any) -> dict[str, Any]:
    """Return the record of a whole step that took as long as eager, with some fields changed."""
    cell = {
        "network": "mlp8-b16",
        "method": method,
        "share": 0.5 if method == "both" else None,
        "limit_s": 30.0,
        "pairs": 1,
        "seed": 0,
        "slack": 0.01,
        "optimizer": optimizer,
    }
    found: dict[str, Any] = {
        "kind": "training",
        "name": f"mlp8-b16 | {optimizer} | {method}",
        "cell": cell,
        "seconds": 9.0,
        "torch": "2.9.0+cpu",
        **CIRCUMSTANCES,
        "status": "ran",
        "reason": "",
        "peak_bytes": 100 * MEBI,
        "process_peak_bytes": 110 * MEBI,
        "baseline_bytes": 200 * MEBI,
        "state_bytes": 60 * MEBI,
        "written_bytes": 8 * MEBI,
        "pairs": [[1.0, 1.1, 1.0, 1.0]],
        "unequal": 0,
        "equal": True,
    }
    if method.startswith(("both", "keep-all")):
        found |= {"status": "optimal", "gap": 0.005, "solve_s": 1.5}
        found |= {"budget_bytes": 100 * MEBI, "keep_all_bytes": 200 * MEBI}
    return found | changes


RECORDS: dict[str, tuple[dict[str, Any], ...]] = {
    "kept": (record(),),
    "over the budget": (record(peak_bytes=101 * MEBI), record(peak_bytes=101 * MEBI + 1)),
    "unequal": (record(equal=False, unequal=3), record(equal=False)),
    "two optimizers": (
        record("in-backward", pairs=[[3.0, 3.0, 1.0, 1.0]]),
        record("both@in-backward"),
        record("in-backward", "momentum"),
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_section_is_what_the_records_say(case: str, told: Told) -> None:
    """Peaks, of which one percent over the budget is for whole pages; what differs, by number."""
    told(section(RECORDS[case], "run.jsonl"))


def test_methods_are_compared_with_the_same_optimizer() -> None:
    """A peer with another optimizer is no peer."""
    of_adamw, of_momentum = duels([TrainingRecord.of(run) for run in RECORDS["two optimizers"]])
    assert of_adamw.won
    assert of_momentum.own is None
    assert of_momentum.best is of_momentum.peer


def test_chart_has_a_panel_for_each_network_and_optimizer() -> None:
    """Compiled steps are one line, peers keep their names, and what did not run is left out."""
    dead = record("both", status="failed")
    del dead["pairs"]
    found = charts.whole_steps(
        [record(), record("keep-all"), record("in-backward", "momentum"), dead]
    )
    assert found.shown == {
        "mlp8-b16, adamw": [["compiled", 100.0, 1.0], ["compiled", 100.0, 1.0]],
        "mlp8-b16, momentum": [["in-backward", 100.0, 1.0]],
    }


def test_page_has_a_section_where_there_is_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """The newest record of whole steps is told on the page of results, network by network."""
    in_folder(tmp_path, monkeypatch)
    other = record() | {"kind": "startup", "name": "python", "rounds": 1}
    write_records(tmp_path, "2026-01-02", other)
    records = [record("eager", peak_bytes=150 * MEBI), record("keep-all"), record()]
    write_records(tmp_path, "2026-01-02-whole-step", *records)
    assert make_results.main([]) == 0
    page = (tmp_path / "results.md").read_text()
    assert page.count("## Whole training steps") == 1
    text = section(records, "2026-01-02-whole-step.jsonl")
    assert text in page
    told(text)
