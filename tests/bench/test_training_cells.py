"""The comparison of training methods: which cells there are, and how they are run and resumed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytorch import compare
from pytorch.cells import AT_PEERS, METHODS, NETWORKS, SHARES, Cell, cells

if TYPE_CHECKING:
    from pathlib import Path


def facts_of(cell: Cell, peak_bytes: int | None = 100) -> dict[str, Any]:
    """Return the facts of a cell that ran."""
    facts = {"cell": cell.to_dict(), "seconds": 1.0, "status": "ran"}
    return facts if peak_bytes is None else facts | {"heap_peak_bytes": peak_bytes}


def test_cells_have_names_of_their_own() -> None:
    """No two cells of the whole comparison have one name."""
    names = [cell.name for cell in cells()]
    budgets = 5 * len(SHARES)
    assert len(names) == len(set(names)) == len(NETWORKS) * (5 + budgets + len(AT_PEERS) - 1)
    assert "bert4-b8 | both | 35%" in names
    assert "bert4-b8 | both@memory-budget | 35%" in names
    assert "bert4-b8 | both@checkpoint" in names


def test_peers_run_before_those_that_need_their_peak() -> None:
    """Whatever order is asked for, a peer comes first."""
    asked = ("both@file-hooks", "file-hooks", "both@memory-budget", "memory-budget")
    found = list(cells(["unet-b8"], asked, [0.5]))
    assert [cell.method for cell in found] == [
        "file-hooks", "memory-budget", "both@file-hooks", "both@memory-budget",
    ]  # fmt: skip
    for own, peer in AT_PEERS:
        assert METHODS.index(peer) < METHODS.index(f"{own}@{peer}")


def test_own_steps_are_told_from_peers() -> None:
    """What comes before the @ says what runs, what comes after it whose peak is the budget."""
    at_peer = Cell(network="unet-b8", method="paging@file-hooks")
    assert (at_peer.own, at_peer.peer) == ("paging", "file-hooks")
    peer = Cell(network="unet-b8", method="file-hooks")
    assert (peer.own, peer.peer) == (None, None)
    assert Cell(network="unet-b8", method="keep-all").own == "keep-all"


def test_peaks_of_peers_become_budgets() -> None:
    """The peak measured before, in this run or an earlier one, is the budget, share by share."""
    budgets: dict[str, int | None] = {}
    written: list[str] = []
    chosen = list(cells(["unet-b8"], ["memory-budget", "both@memory-budget"], [0.5, 0.25]))
    earlier, *rest = chosen
    peaks = {0.5: 500, 0.25: 250}

    def measure(cell: Cell, ram_bytes: int | None) -> dict[str, Any]:
        budgets[cell.name] = ram_bytes
        return facts_of(cell, peaks[cell.share or 0.5])

    compare.run(
        rest, [facts_of(earlier, 500)], lambda name, **_: written.append(name), measure=measure
    )
    assert budgets["unet-b8 | both@memory-budget | 50%"] == 500
    assert budgets["unet-b8 | both@memory-budget | 25%"] == 250
    assert budgets["unet-b8 | memory-budget | 25%"] is None
    assert written == [cell.name for cell in rest]


def test_slack_is_added_to_peaks() -> None:
    """A budget is the peer's peak and the slack."""
    hooks, own = cells(["unet-b8"], ["file-hooks", "both@file-hooks"], slack=0.01)
    budgets: list[int | None] = []

    def measure(cell: Cell, ram_bytes: int | None) -> dict[str, Any]:
        budgets.append(ram_bytes)
        return facts_of(cell, 1000)

    compare.run((hooks, own), [], lambda *_, **__: None, measure=measure)
    assert budgets == [None, 1010]


def test_peer_without_a_peak_is_a_failure_on_record() -> None:
    """A compiled step whose peer failed is not run, and its record says so."""
    records: list[dict[str, Any]] = []
    (cell,) = cells(["unet-b8"], ["both@checkpoint"])
    compare.run(
        [cell], [], lambda name, **facts: records.append(facts | {"name": name}),
        measure=lambda cell, _: pytest.fail(f"{cell.name} was run"),
    )  # fmt: skip
    assert records[0]["status"] == "failed"
    assert "checkpoint has no peak" in records[0]["reason"]


def test_resuming_runs_what_is_missing_or_failed() -> None:
    """A record counts for its own settings, and a failure for none."""
    one, two, three = cells(["unet-b8"], ["eager", "file-hooks", "checkpoint"])
    other = Cell(network="unet-b8", method="checkpoint", pairs=3)
    records = [facts_of(one), facts_of(two) | {"status": "failed"}, facts_of(other)]
    assert compare.still_to_do((one, two, three), records) == (two, three)


def test_existing_file_is_not_mixed_with_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is there needs --resume, which goes on after a line that was cut off."""
    path = tmp_path / "x-training.jsonl"
    done, _ = cells(["unet-b8"], ["eager", "selective"])
    line = json.dumps(facts_of(done))
    path.write_text(f"{line}\n{line[:20]}")
    words = ["--out", str(path), "--network", "unet-b8", "--method", "eager"]
    with pytest.raises(SystemExit):
        compare.main(words)
    assert "--resume goes on" in capsys.readouterr().err
    monkeypatch.setattr(compare, "measured", lambda cell, *_: facts_of(cell))
    assert compare.main([*words, "--method", "selective", "--resume"]) == 0
    records = compare.read_records(path)
    assert [record["cell"]["method"] for record in records] == ["eager", "selective"]
    assert records[1]["kind"] == "training"
    assert records[1]["machine"]["cores"] >= 1
