"""What the page of whole steps says of masks, and what is trained in the benchmark of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from result_pages.masks import block

if TYPE_CHECKING:
    from kit.messages import Told


def run(trained: str, *, masks: bool, **changes: Any) -> dict[str, Any]:
    """Return the record of a step that takes a half with masks."""
    kib = 1024 if masks else 2048
    return {
        "recorded": "2026-11-26T10:00:00+00:00",
        "cell": {"network": "ds-cnn", "trained": trained, "masks": masks},
        "trained": 1164,
        "instructions": 1_050_000 if masks else 1_000_000,
        "keep_all_bytes": 100 * kib,
        "floor_bytes": 10 * kib,
        "recomputing": {"status": "optimal", "bytes": 60 * kib, "bound_bytes": 60.0 * kib},
        "paging": {"status": "optimal", "bytes": 10 * kib, "bound_bytes": 10.0 * kib},
        "limit_s": 30.0,
        **changes,
    }


def test_the_page_has_both_steps_in_a_row(told: Told) -> None:
    """What was not proved has a star, what was not found a dash; a step alone has no row."""
    unproved = {"status": "feasible", "bytes": 70 * 1024, "bound_bytes": 60.0 * 1024}
    nothing = {"status": "unknown", "bytes": None, "bound_bytes": None}
    records = [
        run("all", masks=False),
        run("all", masks=True),
        run("biases", masks=False, paging=nothing),
        run("biases", masks=True, recomputing=unproved),
        run("last-2", masks=True),
    ]
    told(block(records, "x-masks.jsonl"))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("trained", "names"),
    [
        ("all", ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "4.weight", "4.bias"]),
        ("biases", ["0.bias", "1.bias", "4.bias"]),
        ("last-2", ["3.weight", "4.weight", "4.bias"]),
    ],
)
def test_parts_that_are_trained(trained: str, names: list[str]) -> None:
    """A norm belongs to the layer before it, and takes running statistics where it is frozen."""
    pytest.importorskip("torch")
    from torch import nn

    from masks import train

    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model = nn.Sequential(*layers, nn.Linear(4, 2))
    found = train(model, trained)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == names
    assert len(found) == len(names)
    assert model[1].training == (trained == "all")
