"""What the page of results says of whole steps is what the records say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import make_results
from kit.measured_records import CIRCUMSTANCES, in_folder
from result_pages import plot
from result_pages.records import TrainingRecord, duels
from result_pages.whole_steps import goals_table, model_table, section

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

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


def runs(*records: dict[str, Any]) -> list[TrainingRecord]:
    """Return records as runs."""
    return [TrainingRecord.of(each) for each in records]


def test_row_tells_all_of_a_whole_step() -> None:
    """Both peaks, the share of the budget, the baseline, times, bytes, equality, the solve."""
    row = model_table(runs(record())).splitlines()[-1]
    assert row == (
        "| `both` | 50 %, 100.00 MiB | 100.00 MiB | 100.0 % | 110.00 MiB | 200.00 MiB | 1.000 "
        "| 1.100 | 8.00 MiB | yes | 1.5 s | 0.5 % | optimal |"
    )


def test_peaks_over_the_budget_stand_out() -> None:
    """One percent is for whole pages; what is more is a miss."""
    near = runs(record(peak_bytes=101 * MEBI))
    over = runs(record(peak_bytes=101 * MEBI + 1))
    assert "| 101.0 % |" in model_table(near)
    assert "| **101.0 %** |" in model_table(over)
    assert "| 1 of 2 (50.0 %) |" in goals_table([*near, *over]).splitlines()[3]


def test_unequal_steps_are_counted() -> None:
    """What differs is told by number, and a loss that does by name."""
    text = model_table(runs(record(equal=False, unequal=3), record(equal=False)))
    assert "| **no**: 3 |" in text
    assert "| **no**: a loss |" in text


def test_methods_are_compared_with_the_same_optimizer() -> None:
    """A peer with another optimizer is no peer."""
    slow = [[3.0, 3.0, 1.0, 1.0]]
    of_adamw, of_momentum = duels(
        runs(
            record("in-backward", pairs=slow),
            record("both@in-backward"),
            record("in-backward", "momentum"),
        )
    )
    assert of_adamw.won
    assert of_momentum.own is None
    assert of_momentum.best is of_momentum.peer


def test_chart_has_a_panel_for_each_network_and_optimizer() -> None:
    """Compiled steps are one line, peers keep their names, and what did not run is left out."""
    dead = record("both", status="failed")
    del dead["pairs"]
    found = plot.whole_steps(
        [record(), record("keep-all"), record("in-backward", "momentum"), dead]
    )
    assert found.shown == {
        "mlp8-b16, adamw": [["compiled", 100.0, 1.0], ["compiled", 100.0, 1.0]],
        "mlp8-b16, momentum": [["in-backward", 100.0, 1.0]],
    }


def test_page_has_a_section_where_there_is_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest record of whole steps is told on the page of results, network by network."""
    in_folder(tmp_path, monkeypatch)
    other = record() | {"kind": "startup", "name": "python", "rounds": 1}
    (tmp_path / "2026-01-02.jsonl").write_text(json.dumps(other) + "\n")
    records = [record("eager", peak_bytes=150 * MEBI), record("keep-all"), record()]
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (tmp_path / "2026-01-02-whole-step.jsonl").write_text(lines)
    assert make_results.main([]) == 0
    page = (tmp_path / "results.md").read_text()
    assert page.count("## Whole training steps") == 1
    assert section(records, "2026-01-02-whole-step.jsonl") in page
    assert (
        "eager's peak 150.00 MiB, state between steps 60.00 MiB, keeping everything in RAM 200.00 "
        "MiB."
    ) in page
