"""What the measurement of masks trains."""

from __future__ import annotations

import pytest


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
    from masks import train
    from torch import nn

    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model = nn.Sequential(*layers, nn.Linear(4, 2))
    found = train(model, trained)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == names
    assert len(found) == len(names)
    assert model[1].training == (trained == "all")
