"""Small networks of five architectures with their training steps; needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

Step = tuple[nn.Module, Any, tuple[Any, ...]]


class Block(nn.Module):
    """A residual block of two convolutions, each with batch norm."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet(widths: tuple[int, ...] = (8, 16), blocks: int = 1, dropout: float = 0.1) -> nn.Module:
    """Return a residual network for small images; (64, 128, 256, 512) and 2 make ResNet-18."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
    ]  # fmt: skip
    into = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(into, width, 2 if stage and not block else 1))
            into = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(into, 10))
    return nn.Sequential(*layers, *head)


def residual_step(batch: int = 4, size: int = 8, **options: Any) -> Step:
    """Return a step of a residual network on random images."""
    inputs = (torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,)))
    return resnet(**options), functional.cross_entropy, inputs


def plain_step() -> Step:
    """Return a step of a plain convolutional network with dropout in its classifier."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, functional.cross_entropy, (torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))


def depthwise_step() -> Step:
    """Return a step of depthwise and pointwise convolutions."""

    def part(into: int, out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(into, into, 3, padding=1, groups=into, bias=False), nn.BatchNorm2d(into),
            nn.ReLU6(), nn.Conv2d(into, out, 1, bias=False), nn.BatchNorm2d(out),
        ]  # fmt: skip

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.Sequential(*part(3, 8), *part(8, 16), *head)
    return model, functional.cross_entropy, (torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))


class Transformer(nn.Module):
    """Two encoder layers over embedded tokens; the embedding is the output layer's weight too."""

    def __init__(self, width: int = 16, tokens: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def transformer_step() -> Step:
    """Return a step of a small transformer with dropout and a tied weight."""
    inputs = (torch.randint(0, 20, (3, 6)), torch.randint(0, 20, (18,)))
    return Transformer(), functional.cross_entropy, inputs


class UNet(nn.Module):
    """One step down, one up, and a connection past both."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the same size."""
        y = self.down(x)
        z = self.up(self.deep(functional.max_pool2d(y, 2)))
        return self.out(torch.cat((y, z), 1))


def unet_step() -> Step:
    """Return a step of a small U-Net."""
    return UNet(), functional.mse_loss, (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8))


ARCHITECTURES: dict[str, Callable[[], Step]] = {
    "residual": residual_step,
    "plain": plain_step,
    "depthwise": depthwise_step,
    "transformer": transformer_step,
    "U-Net": unet_step,
}
"""Training steps by name."""
