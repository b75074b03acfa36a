"""Small training steps of five architectures, and random ones; needs PyTorch.

A step is a model, a loss function and inputs, of which the last is the target.
"""

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from kit.traced_models import FunctionModule


class Block(nn.Module):
    """A residual block of two convolutions, each with batch norm."""

    def __init__(self, into, out, stride):
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

    def forward(self, x):
        """Return the block's output."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet(widths=(8, 16), blocks=1, dropout=0.1):
    """Return a residual network for small images.

    Widths (64, 128, 256, 512) and 2 blocks per width are those of ResNet-18.
    """
    layers = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
    ]  # fmt: skip
    into = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(into, width, 2 if stage and not block else 1))
            into = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(into, 10))
    return nn.Sequential(*layers, *head)


def residual_step(batch=4, size=8, **options):
    """Return a step of `resnet`, with its options, on random images."""
    inputs = (torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,)))
    return resnet(**options), functional.cross_entropy, inputs


def plain_step():
    """Return a step of a plain convolutional network with dropout in its classifier."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, functional.cross_entropy, (torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))


def depthwise_step():
    """Return a step of depthwise and pointwise convolutions."""

    def part(into, out):
        return [
            nn.Conv2d(into, into, 3, padding=1, groups=into, bias=False), nn.BatchNorm2d(into),
            nn.ReLU6(), nn.Conv2d(into, out, 1, bias=False), nn.BatchNorm2d(out),
        ]  # fmt: skip

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.Sequential(*part(3, 8), *part(8, 16), *head)
    return model, functional.cross_entropy, (torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))


class Transformer(nn.Module):
    """Two encoder layers over embedded tokens; the output layer has the embedding's weight."""

    def __init__(self, width=16, tokens=20):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        """Return the logits of each token."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def transformer_step():
    """Return a step of a small transformer with dropout and a tied weight."""
    inputs = (torch.randint(0, 20, (3, 6)), torch.randint(0, 20, (18,)))
    return Transformer(), functional.cross_entropy, inputs


class UNet(nn.Module):
    """A U-Net with one downsampling, one upsampling, and a skip connection."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x):
        """Return an image of the same size."""
        y = self.down(x)
        z = self.up(self.deep(functional.max_pool2d(y, 2)))
        return self.out(torch.cat((y, z), 1))


def unet_step():
    """Return a step of a small U-Net."""
    return UNet(), functional.mse_loss, (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8))


ARCHITECTURES = {
    "residual": residual_step,
    "plain": plain_step,
    "depthwise": depthwise_step,
    "transformer": transformer_step,
    "U-Net": unet_step,
}
"""Functions by name; each returns a training step."""
_ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Hardtanh, nn.LeakyReLU, nn.ReLU6,
)  # fmt: skip


@st.composite
def trainings(draw):
    """Draw a step of a model of one to five layers on images, signals or rows.

    Seeds the default generator of PyTorch.
    """
    torch.manual_seed(draw(st.integers(0, 99)))
    batch = draw(st.integers(2, 3))
    dimensions = draw(st.sampled_from((0, 1, 2)))
    channels = draw(st.integers(1, 4))
    sizes = tuple(draw(st.integers(4, 7)) for _ in range(dimensions))
    x = torch.randn(batch, channels if dimensions else draw(st.integers(2, 9)), *sizes)
    layers = []
    y = x
    for _ in range(draw(st.integers(1, 5))):
        layer = _draw_layer(draw, y)
        with torch.no_grad():
            y = layer(y)
        layers.append(layer)
    loss, head, target = _draw_head(draw, y)
    return nn.Sequential(*layers, *head), loss, (x, target)


def _draw_layer(draw, x):
    kinds = ["activation", "linear", "residual", "layer norm"]
    if x.ndim > 2:
        kinds += ["convolution", "convolution", "depthwise", "norm", "joined", "upsampled"]
        kinds += ["pooled"] * (min(x.shape[2:]) > 1)
    else:
        kinds.append("norm")
    return _make_layer(draw, draw(st.sampled_from(kinds)), x)


def _make_layer(draw, kind, x):
    flat = x.ndim - 2
    width = x.shape[1]
    if kind == "activation":
        return draw(st.sampled_from(_ACTIVATIONS))()
    if kind == "linear":
        return nn.Linear(x.shape[-1], draw(st.integers(2, 7)), bias=draw(st.booleans()))
    if kind == "layer norm":
        return nn.LayerNorm(x.shape[-1])
    if kind == "norm":
        return (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[flat](width)
    if kind == "residual":
        inner = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), nn.Tanh())
        return FunctionModule(lambda parts, y: y + parts[0](y) * 0.5, inner)
    convolution = (nn.Conv1d, nn.Conv2d)[flat - 1]
    if kind == "joined":
        inner = convolution(width, 2, 3, padding=1)
        return FunctionModule(lambda parts, y: torch.cat((y, parts[0](y)), 1), inner)
    if kind == "upsampled":
        return nn.Upsample(scale_factor=2) if flat == 2 else nn.Identity()
    if kind == "pooled":
        pools = ((nn.MaxPool1d, nn.AvgPool1d), (nn.MaxPool2d, nn.AvgPool2d))[flat - 1]
        return draw(st.sampled_from(pools))(2)
    size, padding = draw(st.integers(1, 3)), draw(st.integers(0, 1))
    while min(x.shape[2:]) + 2 * padding < size:
        size -= 1
    groups = width if kind == "depthwise" else 1
    out = width * draw(st.integers(1, 2)) if kind == "depthwise" else draw(st.integers(1, 5))
    return convolution(
        width, out, size, draw(st.integers(1, 2)), min(padding, size - 1), groups=groups,
        bias=draw(st.booleans()),
    )  # fmt: skip


def _draw_head(draw, y):
    kind = draw(st.sampled_from(("classes", "numbers", "global pool")))
    if kind == "numbers":
        last = nn.Linear(y.shape[-1], 3)
        return functional.mse_loss, [last], torch.randn(*y.shape[:-1], 3)
    head = [nn.Flatten(1), nn.Linear(y[0].numel(), 4)]
    if kind == "global pool" and y.ndim == 4:
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(y.shape[1], 4)]
    return functional.cross_entropy, head, torch.randint(0, 4, (len(y),))
