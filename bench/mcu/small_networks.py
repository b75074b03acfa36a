"""Four small networks, steps of which take seconds on an emulated board."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcu.networks import Training


def perceptron(batch: int = 1) -> Any:
    """Return three linear layers, and the shape of a batch of `batch` samples."""
    from torch import nn

    layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers), (batch, 64)


def lenet() -> Any:
    """Return two convolutions and two linear layers, and the shape of a batch."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)),
    ), (1, 1, 28, 28)


def normalized() -> Any:
    """Return two convolutions with batch norms and a linear layer, and the shape of a batch."""
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
"""Functions that return a sequence of layers with ten classes, and the shape of a batch."""


def make_training(name: str) -> Training:
    """Return a network, cross entropy and a batch, with fixed seeds."""
    import torch

    torch.manual_seed(0)
    model, shape = NETWORKS[name]()
    inputs = (torch.randn(shape), torch.randint(0, 10, shape[:1]))
    return model, torch.nn.functional.cross_entropy, inputs
