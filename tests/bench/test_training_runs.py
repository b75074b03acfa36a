"""The comparison of training methods: which runs there are, and how they are run and resumed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from harness import recorded
from kit.run_processes import ran
from pytorch import compare
from pytorch.runs import (
    AT_PEERS,
    FUSED_SHARES,
    KNOBS,
    METHODS,
    NETWORKS,
    OPTIMIZERS,
    SHARES,
    WHOLE_METHODS,
    WHOLE_NETWORKS,
    WHOLE_PEERS,
    WHOLE_SHARES,
    TrainingRun,
    fused_runs,
    training_runs,
    whole_step_runs,
)

if TYPE_CHECKING:
    from pathlib import Path


def record_of(run: TrainingRun, peak_bytes: int | None = 100, **changes: Any) -> dict[str, Any]:
    """Return the record of a run."""
    return {"cell": run.to_dict(), "status": "ran", "heap_peak_bytes": peak_bytes, **changes}


def test_runs_have_names_of_their_own() -> None:
    """No two runs of the whole comparison have one name."""
    names = [run.name for run in training_runs()]
    budgets = 5 * len(SHARES)
    assert len(names) == len(set(names)) == len(NETWORKS) * (5 + budgets + len(AT_PEERS) - 1)
    assert "bert4-b8 | both | 35%" in names
    assert "bert4-b8 | both@memory-budget | 35%" in names
    assert "bert4-b8 | both@checkpoint" in names


def test_peers_run_before_those_that_need_their_peak() -> None:
    """Whatever order is asked for, a peer comes first."""
    asked = ("both@file-hooks", "file-hooks", "both@memory-budget", "memory-budget")
    found = list(training_runs(["unet-b8"], asked, [0.5]))
    assert [run.method for run in found] == [
        "file-hooks", "memory-budget", "both@file-hooks", "both@memory-budget",
    ]  # fmt: skip
    for own, peer in AT_PEERS:
        assert METHODS.index(peer) < METHODS.index(f"{own}@{peer}")


def test_own_steps_are_told_from_peers() -> None:
    """What comes before the @ says what runs, what comes after it whose peak is the budget."""
    at_peer = TrainingRun(network="unet-b8", method="paging@file-hooks")
    assert (at_peer.own, at_peer.peer) == ("paging", "file-hooks")
    peer = TrainingRun(network="unet-b8", method="file-hooks")
    assert (peer.own, peer.peer) == (None, None)
    assert TrainingRun(network="unet-b8", method="keep-all").own == "keep-all"


def test_peaks_of_peers_become_budgets(tmp_path: Path) -> None:
    """The peak on record, with the slack, is the budget, share by share; peers have none."""
    store = recorded(tmp_path / "x-training.jsonl")
    methods = ["memory-budget", "both@memory-budget"]
    half, quarter, own_half, own_quarter = training_runs(
        ["unet-b8"], methods, [0.5, 0.25], slack=0.01
    )
    store.add(record_of(half, 1000))
    store.add(record_of(quarter, 500))
    assert compare.budget_bytes(own_half, store) == 1010
    assert compare.budget_bytes(own_quarter, store) == 505
    assert compare.budget_bytes(half, store) is None
    other = TrainingRun(network="bert4-b8", method="both@memory-budget", share=0.5)
    assert compare.budget_bytes(other, store) is None


def test_fused_kernels_are_compared_with_stock_at_its_peaks(tmp_path: Path) -> None:
    """Each setting of stock runs before the back end at its peak; a share alone is one of all."""
    store = recorded(tmp_path / "x-fused.jsonl")
    runs = {run.name: run for run in fused_runs(["unet-b8"])}
    names = list(runs)
    for knob in KNOBS:
        stock, own = (f"unet-b8 | {method} | {knob:.0%}" for method in ("stock", "fused@stock"))
        assert names.index(stock) < names.index(own)
    least = runs[f"unet-b8 | fused | {min(FUSED_SHARES):.0%}"]
    assert compare.budget_bytes(least, store) is None
    assert compare.measure(least.to_dict(), None, folder="")["status"] == "failed"
    store.add(record_of(runs["unet-b8 | stock"], 1000))
    store.add(record_of(runs["unet-b8 | stock | 40%"], 700))
    assert compare.budget_bytes(least, store) == int(1000 * min(FUSED_SHARES))
    assert compare.budget_bytes(runs["unet-b8 | fused@stock | 40%"], store) == 700
    assert {run.reference for run in runs.values()} == {"stock"}


def test_whole_steps_have_runs_of_their_own() -> None:
    """Each has its name, and its peer before it; the peer's peak itself is its budget."""
    found = list(whole_step_runs(slack=0.01))
    names = [run.name for run in found]
    each = 2 + 2 * len(WHOLE_PEERS) + 2 * len(WHOLE_SHARES)
    assert len(names) == len(set(names)) == len(OPTIMIZERS) * len(WHOLE_NETWORKS) * each
    assert "mlp8-b16 | adamw | both | 50%" in names
    assert all(run.own for run in found if run.method in ("both", "safe"))
    for run in found:
        if run.peer is not None:
            assert WHOLE_METHODS.index(run.peer) < WHOLE_METHODS.index(run.method)


def test_peaks_of_whole_peers_are_of_the_same_optimizer(tmp_path: Path) -> None:
    """The peak of the process counts, of the peer with that optimizer, without slack."""
    store = recorded(tmp_path / "x-whole-step.jsonl")
    asked = (["unet-b8"], ["checkpoint", "both@checkpoint"])
    peer, own, _, other = whole_step_runs(*asked, slack=0.01)
    store.add(record_of(peer, 900) | {"peak_bytes": 1000})
    assert compare.budget_bytes(own, store) == 1000
    assert compare.budget_bytes(other, store) is None


def test_peer_without_a_peak_is_a_failure_on_record() -> None:
    """A compiled step whose peer failed is not run, and its record says so."""
    (run,) = training_runs(["unet-b8"], ["both@checkpoint"])
    record = compare.measure(run.to_dict(), None, folder="")
    assert record["status"] == "failed"
    assert "checkpoint has no peak" in record["reason"]


def test_run_resumes_what_is_missing_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record counts for its own settings, and a failure for none; --resume goes on."""
    path = tmp_path / "x-training.jsonl"
    done, failed, other = training_runs(["unet-b8"], ["eager", "file-hooks", "selective"])
    old = [
        record_of(done),
        record_of(failed, status="failed"),
        record_of(TrainingRun(network="unet-b8", method="selective", pairs=3)),
    ]
    lines = [json.dumps(record) for record in old]
    path.write_text("\n".join(lines) + "\n" + lines[0][:20])
    words = ["--out", str(path), "--network", "unet-b8", "--storage", str(tmp_path)]
    words += ["--method", "eager", "--method", "file-hooks", "--method", "selective"]
    with pytest.raises(SystemExit):
        compare.main(words)
    assert "--resume goes on" in capsys.readouterr().err
    monkeypatch.setattr(compare, "measure", ran)
    monkeypatch.setattr(compare, "_PRELOADED", ())
    for name in compare._THREADS:
        monkeypatch.setenv(name, "1")  # taken back after the test
    assert compare.main([*words, "--resume"]) == 0
    new = [json.loads(line) for line in path.read_text().splitlines()][3:]
    assert [record["cell"] for record in new] == [failed.to_dict(), other.to_dict()]
    assert new[0]["kind"] == "training"
    assert new[0]["machine"]["cores"] >= 1
