"""What the page on what to train says of a record of choices, and how a choice is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from result_pages.choice import block, chart

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told


def choice(network: str, ram: int, score: float, bound: float, **more: Any) -> dict[str, Any]:
    """Return the record of a choice; all scores together are 10."""
    rules = {"last": {"score": score / 4}, "greedy": {"score": score / 2}}
    return {
        "recorded": "2026-11-26T10:00:00+00:00",
        "cell": {"network": network, "device": "nrf52840", "limit_s": 60.0},
        "ram_budget_bytes": ram,
        "score": score,
        "bound": bound,
        "gap": (bound - score) / bound,
        "total": 10.0,
        "layers": 3,
        "of_layers": 8,
        "seconds": 12.5,
        "rules": rules,
        **more,
    }


def test_the_page_has_a_row_for_each_budget(told: Told) -> None:
    """The best set, what is proved of all others, and both rules, as shares of all scores."""
    records = [
        choice("cnn", 262_144, 5.0, 5.0),
        choice("cnn", 524_288, 8.0, 9.0),
        choice("other", 262_144, 10.0, 10.0, layers=8),
    ]
    told(block(records, "x-choice.jsonl"))


def test_the_chart_has_a_panel_for_each_network() -> None:
    """RAM in KiB, then best set, bound, greedy and last layers in percent."""
    records = [choice("cnn", 262_144, 5.0, 6.0), choice("other", 524_288, 8.0, 8.0)]
    expected = {
        "cnn": [[256.0, 50.0, 60.0, 25.0, 12.5]],
        "other": [[512.0, 80.0, 80.0, 40.0, 20.0]],
    }
    assert chart(records).shown == expected


@pytest.mark.torch
def test_a_choice_is_never_behind_the_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a small network, the record has all that the page needs, and the best set is the best."""
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
    assert "lenet" in block([made], "x-choice.jsonl")
