"""The measurement of which layers train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.torch
def test_a_choice_is_never_behind_the_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a small network, the record has the best set."""
    pytest.importorskip("torch")
    import choosing
    from mcu.networks import lenet

    monkeypatch.setattr(choosing, "NETWORKS", {"lenet": lenet})
    monkeypatch.setattr(choosing, "BUDGETS", ("96KiB",))
    assert choosing.main(["--out", str(tmp_path / "x-choice.jsonl"), "--limit", "20"]) == 0
    (made,) = choosing.latest(tmp_path / "x-choice.jsonl").records()
    assert made["score"] >= max(rule["score"] for rule in made["rules"].values())
    assert made["score"] <= made["bound"] <= made["total"]
    assert made["peak_ram_bytes"] <= made["ram_budget_bytes"]
    assert 0 < made["layers"] < made["of_layers"]
