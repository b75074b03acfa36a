"""Networks that train on microcontrollers, each with its loss and inputs.

Each function returns model, loss and inputs, as ``poetmodel trace bench/mcu/networks.py:resnet8``
expects; `NETWORKS` contains them by name. No network has dropout, so that steps can be compared.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Training = tuple[nn.Module, Any, tuple[torch.Tensor, ...]]
"""Model, loss (None if the model returns it), and inputs, the last of which is the target if there
is a loss."""


# -- layers ----------------------------------------------------------------------------------------


class Residual(nn.Module):  # type: ignore[misc, unused-ignore]
    """A body with a shortcut around it."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of body and shortcut."""
        return self.body(x) + self.shortcut(x)


class Joined(nn.Module):  # type: ignore[misc, unused-ignore]
    """A body whose output is concatenated with its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return input and output, concatenated along channels."""
        return torch.cat((x, self.body(x)), 1)


class Reconstruction(nn.Module):  # type: ignore[misc, unused-ignore]
    """A network that reconstructs its input, and the mean squared error as its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error."""
        return functional.mse_loss(self.network(x), x)


def _split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


class Attention(nn.Module):  # type: ignore[misc, unused-ignore]
    """Self-attention written out: products and a softmax (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a mixture of all positions for each position."""
        projections = (self.query, self.key, self.value)
        query, key, value = (_split_heads(projection(x), self.heads) for projection in projections)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mixed = scores.softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class PackedAttention(nn.Module):  # type: ignore[misc, unused-ignore]
    """Self-attention by PyTorch's function, with one projection for all three."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a mixture of all positions, or of those before it, for each position."""
        query, key, value = (_split_heads(y, self.heads) for y in self.projection(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class Embedded(nn.Module):  # type: ignore[misc, unused-ignore]
    """Embeddings of tokens, positions and segments."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Embedding(length, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a vector for each token; all are in the first segment."""
        places = torch.arange(ids.shape[1], device=ids.device)
        segments = torch.zeros_like(ids)
        return self.norm(self.token(ids) + self.place(places) + self.segment(segments))


class Patches(nn.Module):  # type: ignore[misc, unused-ignore]
    """Vectors of the patches of an image, after one learned vector for the class."""

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.place = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the vector of the class and one for each patch."""
        patches = self.embed(x).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(len(x), -1, -1), patches), 1) + self.place


class FirstVector(nn.Module):  # type: ignore[misc, unused-ignore]
    """Selection of the first vector of a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first vector."""
        return x[:, 0]


def convolution(
    into: int, out: int, stride: int = 1, *, size: int = 3, groups: int = 1, bias: bool = False
) -> tuple[nn.Module, nn.Module]:
    """Return a convolution, padded so that only the stride reduces the size, and its batch norm."""
    layer = nn.Conv2d(into, out, size, stride, size // 2, groups=groups, bias=bias)
    return layer, nn.BatchNorm2d(out)


def separable(into: int, out: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Return a depthwise and a pointwise convolution, each with batch norm and ReLU."""
    return (
        *convolution(into, into, stride, groups=into, bias=True), nn.ReLU(),
        *convolution(into, out, size=1, bias=True), nn.ReLU(),
    )  # fmt: skip


def bottlenecks(
    into: int, rows: Iterable[tuple[int, int, int, int, int]], *, widens: bool = True
) -> Iterator[nn.Module]:
    """Yield inverted bottlenecks (Sandler et al., 2018).

    Parameters
    ----------
    into : int
        Channels of the input.
    rows : iterable of tuple
        Kernel, expansion, channels, number of blocks, and stride of the first one.
    widens : bool
        Whether blocks with an expansion of 1 begin with a convolution, too.
    """
    for kernel, expansion, out, count, first_stride in rows:
        for block in range(count):
            stride, width = 1 if block else first_stride, expansion * into
            has_expansion = widens or expansion > 1
            body = nn.Sequential(
                *((*convolution(into, width, size=1), nn.ReLU6()) if has_expansion else ()),
                *convolution(width, width, stride, size=kernel, groups=width), nn.ReLU6(),
                *convolution(width, out, size=1),
            )  # fmt: skip
            yield Residual(body) if stride == 1 and into == out else body
            into = out


def make_images(
    batch: int, size: int, *, channels: int = 3, classes: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random square images and their classes."""
    return torch.randn(batch, channels, size, size), torch.randint(0, classes, (batch,))


def _make_classifier(layers: list[nn.Module], width: int, classes: int) -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return nn.Sequential(*layers, *head)


def _make_language_model(width: int, batch: int, *blocks: nn.Module) -> Training:
    tokens, length = 64, 16
    head = (FirstVector(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    model = nn.Sequential(Embedded(tokens, length, width), *blocks, *head)
    inputs = (torch.randint(0, tokens, (batch, length)), torch.randint(0, 2, (batch,)))
    return model, functional.cross_entropy, inputs


# -- MLPerf Tiny (Banbury et al., 2021); sizes as in `poetmodel.graph.zoo.tiny` --------------------


def resnet8(batch: int = 1, width: int = 16) -> Training:
    """Return ResNet-8 for CIFAR-10."""
    layers: list[nn.Module] = [*convolution(3, width, bias=True), nn.ReLU()]
    into = width
    for out, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        first_layers = (*convolution(into, out, stride, bias=True), nn.ReLU())
        body = nn.Sequential(*first_layers, *convolution(out, out, bias=True))
        shortcut = None if into == out else nn.Conv2d(into, out, 1, stride)
        layers += [Residual(body, shortcut), nn.ReLU()]
        into = out
    return _make_classifier(layers, into, 10), functional.cross_entropy, make_images(batch, 32)


def thin_resnet8(batch: int = 1) -> Training:
    """Return ResNet-8 of half the width."""
    return resnet8(batch, 8)


def mobilenetv1_vww(batch: int = 1) -> Training:
    """Return MobileNet of width 0.25 for visual wake words."""
    layers: list[nn.Module] = [*convolution(3, 8, 2, bias=True), nn.ReLU()]
    blocks = ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *((128, 1),) * 5)
    into = 8
    for out, stride in (*blocks, (256, 2), (256, 1)):
        layers += separable(into, out, stride)
        into = out
    return (
        _make_classifier(layers, into, 2),
        functional.cross_entropy,
        make_images(batch, 96, classes=2),
    )


class Pixels(nn.Module):  # type: ignore[misc, unused-ignore]
    """Conversion of bytes to numbers from -1 to 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers."""
        return x.to(torch.float32) / 127.5 - 1


def mobilenetv1_bytes(batch: int = 1) -> Training:
    """Return MobileNet of width 0.25 on byte images."""
    model, loss_fn, (x, target) = mobilenetv1_vww(batch)
    x = torch.randint_like(x, 256).to(torch.uint8)
    return nn.Sequential(Pixels(), model), loss_fn, (x, target)


def ds_cnn(batch: int = 1) -> Training:
    """Return DS-CNN for keyword spotting; its first layer pads both sides equally."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, (10, 4), 2, (5, 1)), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range(4):
        layers += separable(64, 64)
    inputs = (torch.randn(batch, 1, 49, 10), torch.randint(0, 12, (batch,)))
    return _make_classifier(layers, 64, 12), functional.cross_entropy, inputs


def autoencoder(batch: int = 2) -> Training:
    """Return the autoencoder for machine sounds; its batch norms need at least two samples."""
    layers: list[nn.Module] = []
    into = 640
    for out in (128, 128, 128, 128, 8, 128, 128, 128, 128):
        layers += [nn.Linear(into, out), nn.BatchNorm1d(out), nn.ReLU()]
        into = out
    model = Reconstruction(nn.Sequential(*layers, nn.Linear(into, 640)))
    return model, None, (torch.randn(batch, 640),)


# -- other networks --------------------------------------------------------------------------------


def mobilenetv2(batch: int = 1, size: int = 48) -> Training:
    """Return MobileNetV2 of width 0.35 for square images (Sandler et al., 2018)."""
    rows = (
        (3, 1, 8, 1, 1), (3, 6, 8, 2, 2), (3, 6, 16, 3, 2), (3, 6, 24, 4, 2), (3, 6, 32, 3, 1),
        (3, 6, 56, 3, 2), (3, 6, 112, 1, 1),
    )  # fmt: skip
    layers = [*convolution(3, 16, 2), nn.ReLU6(), *bottlenecks(16, rows, widens=False)]
    layers += [*convolution(112, 1280, size=1), nn.ReLU6()]
    return _make_classifier(layers, 1280, 10), functional.cross_entropy, make_images(batch, size)


def lenet(batch: int = 1) -> Training:
    """Return LeNet-5 for images of 28 x 28, with ReLU and max pooling (after LeCun, 1998)."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip
    return model, functional.cross_entropy, make_images(batch, 28, channels=1)


def mlp(batch: int = 1) -> Training:
    """Return LeNet-300-100 on images of 28 x 28 (LeCun et al., 1998)."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(),
        nn.Linear(100, 10),
    )  # fmt: skip
    return model, functional.cross_entropy, make_images(batch, 28, channels=1)


def bert(batch: int = 1) -> Training:
    """Return a BERT of one block of width 32 on 16 tokens (after Devlin et al., 2019)."""
    width = 32
    feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    block = (
        Residual(Attention(width, 2)), nn.LayerNorm(width), Residual(feed), nn.LayerNorm(width)
    )  # fmt: skip
    return _make_language_model(width, batch, *block)


def encoder_layer(batch: int = 1) -> Training:
    """Return a BERT with PyTorch's encoder layer, without dropout."""
    block = nn.TransformerEncoderLayer(32, 2, 128, 0.0, activation="gelu", batch_first=True)
    return _make_language_model(32, batch, block)


def vit(batch: int = 1) -> Training:
    """Return a vision transformer of one block: 4 x 4 patches of 16 x 16 (Dosovitskiy et al.)."""
    width = 32
    attention = nn.Sequential(nn.LayerNorm(width), PackedAttention(width, 2))
    feed = nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )
    model = nn.Sequential(
        Patches(16, 4, width), Residual(attention), Residual(feed), nn.LayerNorm(width),
        FirstVector(), nn.Linear(width, 10),
    )  # fmt: skip
    return model, functional.cross_entropy, make_images(batch, 16)


def unet(batch: int = 1) -> Training:
    """Return a U-Net of three levels for images of 32 x 32 (after Ronneberger et al., 2015).

    One level is upsampled by a transposed convolution, the other by nearest neighbours. The loss
    is the cross entropy of two classes at each pixel.
    """

    def make_level(into: int, width: int, inner: nn.Module) -> nn.Module:
        down = nn.Sequential(*convolution(into, width), nn.ReLU())
        joined = Joined(nn.Sequential(nn.MaxPool2d(2), inner))
        return nn.Sequential(down, joined, *convolution(2 * width, width), nn.ReLU())

    bottom = nn.Sequential(*convolution(16, 32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, 2))
    middle = nn.Sequential(
        make_level(8, 16, bottom), nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 1)
    )
    model = nn.Sequential(make_level(3, 8, middle), nn.Conv2d(8, 2, 1))
    inputs = (torch.randn(batch, 3, 32, 32), torch.randint(0, 2, (batch, 32, 32)))
    return model, functional.cross_entropy, inputs


def m5(batch: int = 1) -> Training:
    """Return M5 of 32 channels for a second of speech at 8 kHz (Dai et al., 2017)."""
    layers: list[nn.Module] = []
    into = 1
    for out, size, stride in ((32, 80, 16), (32, 3, 1), (64, 3, 1), (64, 3, 1)):
        layers += [nn.Conv1d(into, out, size, stride), nn.BatchNorm1d(out), nn.ReLU()]
        layers.append(nn.MaxPool1d(4))
        into = out
    head = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(into, 35))
    inputs = (torch.randn(batch, 1, 8000), torch.randint(0, 35, (batch,)))
    return nn.Sequential(*layers, *head), functional.cross_entropy, inputs


NETWORKS: Final[dict[str, Callable[..., Training]]] = {
    "resnet8": resnet8,
    "mobilenetv1-vww": mobilenetv1_vww,
    "ds-cnn": ds_cnn,
    "autoencoder": autoencoder,
    "mobilenetv2-035": mobilenetv2,
    "lenet": lenet,
    "resnet8-thin": thin_resnet8,
    "bert-block": bert,
    "encoder-layer": encoder_layer,
    "vit-block": vit,
    "unet": unet,
    "m5": m5,
    "mlp": mlp,
}
"""Function that returns each network, by name; its argument is the number of samples."""
LARGER: Final[dict[str, Callable[..., Training]]] = {
    "mobilenetv2-035-96": partial(mobilenetv2, size=96),
    "mobilenetv2-035-128": partial(mobilenetv2, size=128),
    "mobilenetv1-vww-bytes": mobilenetv1_bytes,
}
"""Functions of networks for larger images or byte images, which are tried on boards only."""


# -- sizes of networks -----------------------------------------------------------------------------


def count_parameters(training: Training) -> int:
    """Return the number of all parameters, frozen ones included."""
    return sum(p.numel() for p in training[0].parameters())


def count_forward_macs(training: Training) -> int:
    """Return the multiply-accumulates of convolutions and matrix products in a forward pass."""
    model, _, inputs = training
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        copy.deepcopy(model)(inputs[0])
    return int(counter.get_total_flops()) // 2


def count_step_macs(training: Training) -> int:
    """Return the multiply-accumulates of a forward and a backward pass."""
    model, loss_fn, inputs = training
    model = copy.deepcopy(model)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(inputs[0]) if loss_fn is None else loss_fn(model(inputs[0]), inputs[1])
        loss.backward()
    return int(counter.get_total_flops()) // 2
