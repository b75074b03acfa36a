"""Four small networks whose steps are held to their instructions on a board."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from poetmodel.export.exporting import in_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.export.step import LoweredStep


def perceptron(batch: int = 1) -> Any:
    """Return three linear layers, and the shape of a batch."""
    from torch import nn

    layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers), (batch, 64)


def lenet() -> Any:
    """Return two convolutions and two linear layers."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)),
    ), (1, 1, 28, 28)


def normalized() -> Any:
    """Return two convolutions with batch norms."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    ), (4, 1, 16, 16)


NETWORKS: Final[dict[str, Callable[[], Any]]] = {
    "perceptron": perceptron,
    "perceptron in batches": lambda: perceptron(8),
    "lenet": lenet,
    "batch norms": normalized,
}


def captured(name: str, tile: str | None = None) -> LoweredStep:
    """Return the step of a network with plain SGD, in tiles of a size if one is given."""
    torch = pytest.importorskip("torch")
    from poetmodel.torch.lowering.step import lower

    torch.manual_seed(0)
    model, shape = NETWORKS[name]()
    inputs = (torch.randn(shape), torch.randint(0, 10, shape[:1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = lower(model, torch.nn.functional.cross_entropy, inputs, optimizer=optimizer)
    return in_tiles(step, tile)
