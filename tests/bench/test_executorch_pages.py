"""What the page on ExecuTorch says of a record of arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from result_pages.executorch import block

if TYPE_CHECKING:
    from kit.messages import Told


def run(network: str, share: float, budget: int, arena: int, **more: Any) -> dict[str, Any]:
    """Return a record of a program; ExecuTorch's own has 100 KiB."""
    return {
        "recorded": "2026-11-26T10:00:00+00:00",
        "cell": {"network": network, "share": share},
        "ram_budget_bytes": budget,
        "arena_bytes": arena,
        "executorch_bytes": 102_400,
        "greedy_bytes": arena,
        "recomputed": 3,
        "overhead": 0.125,
        "gap": 0.01,
        "refused": "",
        "equal": 9,
        "compared": 9,
        "device": "rpi4b",
        "limit_s": 30.0,
        **more,
    }


def test_the_page_has_a_row_for_each_budget(told: Told) -> None:
    """A budget that stands for two is there once; what misses it, and what differs, is seen."""
    least = {"refused": "ram: 60 KiB is too little for the arena of Mlp: the least is ram=81920"}
    records = [
        run("cnn", 0.6, 61_440, 61_000, greedy_bytes=65_536),
        run("cnn", 0.5, 51_200, 51_200, gap=None, equal=8),
        run("mlp", 0.6, 81_920, 81_920, **least),
        run("mlp", 0.5, 81_920, 81_920, **least),
        run("vit", 0.6, 81_920, 81_920, refused="too little: ram=81920 is enough, and less never"),
    ]
    told(block(records, "x-executorch.jsonl"))
