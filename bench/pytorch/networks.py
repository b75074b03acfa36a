"""The networks that training methods are compared on, each with its loss and inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

Training = tuple[nn.Sequential, Any, tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Sequential):  # type: ignore[misc, unused-ignore]
    """Layers that checkpointing computes again together."""


class Residual(nn.Module):  # type: ignore[misc, unused-ignore]
    """A body with a shortcut around it."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both ways."""
        return self.after(self.body(x) + self.shortcut(x))


class Joined(nn.Module):  # type: ignore[misc, unused-ignore]
    """A body whose output is put beside its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return input and output, channel by channel."""
        return torch.cat((x, self.body(x)), 1)


class Embedded(nn.Module):  # type: ignore[misc, unused-ignore]
    """Tokens and their places as vectors."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a vector for each token."""
        return self.token(x) + self.place


class Causal(nn.Module):  # type: ignore[misc, unused-ignore]
    """Self-attention that looks back only."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each token finds before it."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Transposed(nn.Module):  # type: ignore[misc, unused-ignore]
    """Channels last, for patches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a vector for each patch."""
        return x.transpose(1, 2)


class Gated(nn.Module):  # type: ignore[misc, unused-ignore]
    """Two linear layers, the first one gated by a third (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what passes the gate."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def convolution(into: int, out: int, stride: int = 1, *, size: int = 3, groups: int = 1) -> Any:
    """Return a convolution without bias and its batch norm."""
    layer = nn.Conv2d(into, out, size, stride, size // 2, groups=groups, bias=False)
    return layer, nn.BatchNorm2d(out)


def resnet18(batch: int) -> Training:
    """Return ResNet-18 for images of 32 x 32 (He et al., 2016), with dropout."""
    layers: list[nn.Module] = [Block(*convolution(3, 64), nn.ReLU())]
    into = 64
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(*convolution(into, out, stride), nn.ReLU(), *convolution(out, out))
            plain = stride == 1 and into == out
            shortcut = nn.Identity() if plain else nn.Sequential(
                *convolution(into, out, stride, size=1)
            )  # fmt: skip
            layers.append(Block(Residual(body, shortcut, nn.ReLU())))
            into = out
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(into, 10))
    return nn.Sequential(*layers, *head), functional.cross_entropy, _images(batch, 32)


def vgg16(batch: int) -> Training:
    """Return VGG-16 for images of 32 x 32 (Simonyan and Zisserman, 2015), with dropout."""
    layers: list[nn.Module] = []
    into = 3
    for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        stage: list[nn.Module] = []
        for _ in range(count):
            stage += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU()]
            into = out
        layers.append(Block(*stage, nn.MaxPool2d(2)))
    head = (
        nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU(),
        nn.Dropout(), nn.Linear(512, 10),
    )  # fmt: skip
    return nn.Sequential(*layers, *head), functional.cross_entropy, _images(batch, 32)


def mobilenet_v2(batch: int) -> Training:
    """Return MobileNetV2 for images of 96 x 96 (Sandler et al., 2018)."""
    layers: list[nn.Module] = [Block(*convolution(3, 32, 2), nn.ReLU6())]
    into = 32
    rows = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    )  # fmt: skip
    for expansion, out, count, first in rows:
        for block in range(count):
            stride, wide = first if not block else 1, expansion * into
            body = nn.Sequential(
                *convolution(into, wide, size=1), nn.ReLU6(),
                *convolution(wide, wide, stride, groups=wide), nn.ReLU6(),
                *convolution(wide, out, size=1),
            )  # fmt: skip
            same = stride == 1 and into == out
            whole = Residual(body, nn.Identity(), nn.Identity()) if same else body
            layers.append(Block(whole))
            into = out
    last = Block(*convolution(into, 1280, size=1), nn.ReLU6())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 10))
    model = nn.Sequential(*layers, last, *head)
    return model, functional.cross_entropy, _images(batch, 96)


def bert(batch: int) -> Training:
    """Return 4 encoder layers of width 256 on 128 tokens (after Devlin et al., 2019)."""
    width, length, tokens = 256, 128, 1000
    layers = [
        Block(nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True))
        for _ in range(4)
    ]
    return _language(width, length, tokens, layers, batch)


def gpt(batch: int) -> Training:
    """Return 4 decoder blocks of width 256 on 128 tokens (after Radford et al., 2019)."""
    width, length, tokens = 256, 128, 1000
    layers = []
    for _ in range(4):
        attention = nn.Sequential(nn.LayerNorm(width), Causal(width, 4), nn.Dropout(0.1))
        inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width), nn.Dropout(0.1),
        )  # fmt: skip
        layers.append(
            Block(*(Residual(b, nn.Identity(), nn.Identity()) for b in (attention, inner)))
        )
    return _language(width, length, tokens, layers, batch)


def vit(batch: int) -> Training:
    """Return 4 encoder layers of width 256 on 8 x 8 patches of images of 64 x 64 (Dosovitskiy)."""
    width, classes = 256, 10
    layers = [
        Block(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True
            )
        )
        for _ in range(4)
    ]
    patches = (nn.Conv2d(3, width, 8, 8), nn.Flatten(2), Transposed())
    head = (nn.LayerNorm(width), nn.Flatten(), nn.Linear(64 * width, classes))
    model = nn.Sequential(*patches, *layers, *head)
    return model, functional.cross_entropy, _images(batch, 64)


def decoder(batch: int) -> Training:
    """Return 4 decoder blocks of width 256 with RMS norm and gated layers (after Touvron, 2023)."""
    width, length, tokens = 256, 128, 1000
    layers = []
    for _ in range(4):
        attention = nn.Sequential(nn.RMSNorm(width), Causal(width, 4))
        inner = nn.Sequential(nn.RMSNorm(width), Gated(width, 3 * width))
        layers.append(
            Block(*(Residual(b, nn.Identity(), nn.Identity()) for b in (attention, inner)))
        )
    return _language(width, length, tokens, layers, batch)


def unet(batch: int) -> Training:
    """Return a U-Net of three levels for images of 64 x 64 (after Ronneberger et al., 2015)."""

    def level(into: int, width: int, inner: nn.Module | None) -> nn.Module:
        way_down = Block(*convolution(into, width), nn.ReLU())
        if inner is None:
            return way_down
        up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        joined = Joined(nn.Sequential(nn.MaxPool2d(2), inner, up))
        return nn.Sequential(way_down, joined, Block(*convolution(2 * width, width), nn.ReLU()))

    model = level(3, 32, level(32, 64, level(64, 128, None)))
    x, _ = _images(batch, 64)
    out = nn.Conv2d(32, 1, 1)
    return nn.Sequential(model, out), functional.mse_loss, (x, torch.randn(batch, 1, 64, 64))


def mlp(batch: int) -> Training:
    """Return eight linear layers of width 1024: most of its memory is state."""
    width = 1024
    layers = [Block(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    inputs = (torch.randn(batch, width), torch.randint(0, 10, (batch,)))
    return nn.Sequential(*layers, nn.Linear(width, 10)), functional.cross_entropy, inputs


def _images(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))


def _language(width: int, length: int, tokens: int, layers: list[Any], batch: int) -> Training:
    head = (nn.Linear(width, tokens), nn.Flatten(0, 1))
    model = nn.Sequential(Embedded(tokens, length, width), *layers, *head)
    inputs = (
        torch.randint(0, tokens, (batch, length)), torch.randint(0, tokens, (batch * length,))
    )  # fmt: skip
    return model, functional.cross_entropy, inputs


NETWORKS: Final[dict[str, Callable[[], Training]]] = {
    "resnet18-b1": lambda: resnet18(1),
    "resnet18-b8": lambda: resnet18(8),
    "vgg16-b8": lambda: vgg16(8),
    "mobilenetv2-b8": lambda: mobilenet_v2(8),
    "bert4-b8": lambda: bert(8),
    "gpt4-b8": lambda: gpt(8),
    "unet-b8": lambda: unet(8),
    "vit4-b8": lambda: vit(8),
    "decoder4-b8": lambda: decoder(8),
    "mlp8-b16": lambda: mlp(16),
}
"""Networks by name."""
