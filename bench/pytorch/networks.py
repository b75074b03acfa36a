"""Networks on which training methods are compared, each with its loss and a batch.

`NETWORKS` contains them by name. `pytorch.floors` calls the functions by their names.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from mcu.networks import Joined, PackedAttention, Residual, bottlenecks, convolution, make_images

if TYPE_CHECKING:
    from collections.abc import Callable

Training = tuple[nn.Sequential, Any, tuple[torch.Tensor, torch.Tensor]]
"""Model, loss, and a batch of inputs and targets."""
WIDTH: Final = 256
"""Width of the transformers."""


class Block(nn.Sequential):  # type: ignore[misc, unused-ignore]
    """Layers that checkpointing recomputes as a unit."""


class Embedded(nn.Module):  # type: ignore[misc, unused-ignore]
    """Embeddings of tokens and positions."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a vector for each token, its position added."""
        return self.token(x) + self.place


class Transposed(nn.Module):  # type: ignore[misc, unused-ignore]
    """Transposition of patches to channels last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a vector for each patch."""
        return x.transpose(1, 2)


class Gated(nn.Module):  # type: ignore[misc, unused-ignore]
    """Two linear layers, the first one gated by a third with SiLU (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gated product, projected to the input width."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def resnet18(batch: int) -> Training:
    """Return ResNet-18 for images of 32 x 32 (He et al., 2016), with dropout."""
    layers: list[nn.Module] = [Block(*convolution(3, 64), nn.ReLU())]
    into = 64
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(*convolution(into, out, stride), nn.ReLU(), *convolution(out, out))
            plain = stride == 1 and into == out
            shortcut = None if plain else nn.Sequential(*convolution(into, out, stride, size=1))
            layers.append(Block(Residual(body, shortcut), nn.ReLU()))
            into = out
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(into, 10))
    return nn.Sequential(*layers, *head), functional.cross_entropy, make_images(batch, 32)


class Split(nn.Module):  # type: ignore[misc, unused-ignore]
    """Convolutions of three groups of channels, each on its group plus the previous result.

    The fourth group is passed on. The first block of a stage adds no previous results, and pools
    the fourth group.
    """

    def __init__(self, width: int, stride: int, *, is_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*convolution(width, width, stride), nn.ReLU()) for _ in range(3)
        )
        self.width, self.is_first = width, is_first
        self.pool = nn.AvgPool2d(3, stride, 1) if is_first else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of all groups, concatenated along channels."""
        *groups, last = x.split(self.width, 1)
        results: list[torch.Tensor] = []
        for layer, group in zip(self.layers, groups, strict=True):
            has_sum = results and not self.is_first
            results.append(layer(group + results[-1] if has_sum else group))
        return torch.cat([*results, self.pool(last)], 1)


def res2net50(batch: int) -> Training:
    """Return Res2Net-50 with 4 groups of 26 channels for images of 64 x 64 (Gao et al., 2019)."""
    layers: list[nn.Module] = [*convolution(3, 64, 2, size=7), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    into = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width, out = 26 * 2**stage, 256 * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(
                *convolution(into, 4 * width, size=1), nn.ReLU(),
                Split(width, stride, is_first=not block), *convolution(4 * width, out, size=1),
            )  # fmt: skip
            shortcut = nn.Sequential(*convolution(into, out, stride, size=1))
            layers.append(Block(Residual(body, None if block else shortcut), nn.ReLU()))
            into = out
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10))
    return nn.Sequential(*layers, *head), functional.cross_entropy, make_images(batch, 64)


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
    return nn.Sequential(*layers, *head), functional.cross_entropy, make_images(batch, 32)


def mobilenet_v2(batch: int) -> Training:
    """Return MobileNetV2 for images of 96 x 96 (Sandler et al., 2018)."""
    rows = (
        (3, 1, 16, 1, 1), (3, 6, 24, 2, 2), (3, 6, 32, 3, 2), (3, 6, 64, 4, 2), (3, 6, 96, 3, 1),
        (3, 6, 160, 3, 2), (3, 6, 320, 1, 1),
    )  # fmt: skip
    layers = [Block(*convolution(3, 32, 2), nn.ReLU6()), *map(Block, bottlenecks(32, rows))]
    last = Block(*convolution(320, 1280, size=1), nn.ReLU6())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 10))
    model = nn.Sequential(*layers, last, *head)
    return model, functional.cross_entropy, make_images(batch, 96)


def _make_encoder_layer(*, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=norm_first
    )
    return Block(layer)


def bert(batch: int) -> Training:
    """Return 4 encoder layers of width 256 on 128 tokens (after Devlin et al., 2019)."""
    return _make_language_model([_make_encoder_layer() for _ in range(4)], batch)


def gpt(batch: int) -> Training:
    """Return 4 decoder blocks of width 256 on 128 tokens (after Radford et al., 2019)."""
    layers = []
    for _ in range(4):
        attention = nn.Sequential(
            nn.LayerNorm(WIDTH), PackedAttention(WIDTH, 4, causal=True), nn.Dropout(0.1)
        )
        inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1),
        )  # fmt: skip
        layers.append(Block(Residual(attention), Residual(inner)))
    return _make_language_model(layers, batch)


def decoder(batch: int) -> Training:
    """Return 4 decoder blocks of width 256 with RMS norm and gated layers (after Llama)."""
    layers = []
    for _ in range(4):
        attention = nn.Sequential(nn.RMSNorm(WIDTH), PackedAttention(WIDTH, 4, causal=True))
        inner = nn.Sequential(nn.RMSNorm(WIDTH), Gated(WIDTH, 3 * WIDTH))
        layers.append(Block(Residual(attention), Residual(inner)))
    return _make_language_model(layers, batch)


def vit(batch: int) -> Training:
    """Return 4 encoder layers on 8 x 8 patches of 64 x 64 images (Dosovitskiy et al., 2021)."""
    layers = [_make_encoder_layer(norm_first=True) for _ in range(4)]
    patches = (nn.Conv2d(3, WIDTH, 8, 8), nn.Flatten(2), Transposed())
    head = (nn.LayerNorm(WIDTH), nn.Flatten(), nn.Linear(64 * WIDTH, 10))
    return nn.Sequential(*patches, *layers, *head), functional.cross_entropy, make_images(batch, 64)


def unet(batch: int, *, width: int = 32, size: int = 64) -> Training:
    """Return a U-Net of three levels for square images (after Ronneberger et al., 2015)."""

    def make_level(into: int, width: int, inner: nn.Module | None) -> nn.Module:
        down = Block(*convolution(into, width), nn.ReLU())
        if inner is None:
            return down
        up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        joined = Joined(nn.Sequential(nn.MaxPool2d(2), inner, up))
        return nn.Sequential(down, joined, Block(*convolution(2 * width, width), nn.ReLU()))

    model = make_level(
        3, width, make_level(width, 2 * width, make_level(2 * width, 4 * width, None))
    )
    x, _ = make_images(batch, size)
    head = nn.Conv2d(width, 1, 1)
    return nn.Sequential(model, head), functional.mse_loss, (x, torch.randn(batch, 1, size, size))


def mlp(batch: int) -> Training:
    """Return eight linear layers of width 1024 and a classifier; most of the memory is state."""
    width = 1024
    layers = [Block(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    inputs = (torch.randn(batch, width), torch.randint(0, 10, (batch,)))
    return nn.Sequential(*layers, nn.Linear(width, 10)), functional.cross_entropy, inputs


def _make_language_model(layers: list[Any], batch: int) -> Training:
    length, tokens = 128, 1000
    head = (nn.Linear(WIDTH, tokens), nn.Flatten(0, 1))
    model = nn.Sequential(Embedded(tokens, length, WIDTH), *layers, *head)
    x, y = torch.randint(0, tokens, (batch, length)), torch.randint(0, tokens, (batch * length,))
    return model, functional.cross_entropy, (x, y)


_WITH_BATCH_8: Final[dict[str, Callable[[int], Training]]] = {
    "resnet18": resnet18,
    "vgg16": vgg16,
    "mobilenetv2": mobilenet_v2,
    "bert4": bert,
    "gpt4": gpt,
    "unet": unet,
    "vit4": vit,
    "decoder4": decoder,
}
NETWORKS: Final[dict[str, Callable[[], Training]]] = {
    "resnet18-b1": partial(resnet18, 1),
    **{f"{name}-b8": partial(make, 8) for name, make in _WITH_BATCH_8.items()},
    "mlp8-b16": partial(mlp, 16),
}
"""Function that returns each network, by name; ``b8`` is a batch of eight."""
