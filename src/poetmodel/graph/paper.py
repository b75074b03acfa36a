"""The training graphs of the published POET code, for comparison with the zoo's correct ones.

Facts and figures are those of github.com/ShishirPatil/poet (``poet/architectures``,
``poet/power_computation.py``, ``poet/power_computation_transformer.py``): its operators, its FLOP
rules, four bytes per element, and a backward pass that is one reversed chain. They are kept as
they are, with their faults; ``docs/deviations.md`` lists those. Time and energy there are FLOP
over a device's FLOP/s and FLOP/J, and a transfer is latency plus bytes over rate times power, so
`poetmodel.device.Costs.estimate` with the ``paper-*`` devices gives its costs exactly.

Every function takes the samples of a training step as `batch_size`, where the published code has
one.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.errors import GraphError
from poetmodel.graph.paper_network import Network, PaperLayer, training_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.graph.structure import Graph

_VGG16: Final = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions between two poolings."""

_RESNET18: Final = ((64, 2), (128, 2), (256, 2), (512, 2))
_RESNET50: Final = ((64, 3), (128, 4), (256, 6), (512, 3))
_RESNET18_CIFAR: Final = ((16, 2), (32, 2), (64, 2))
"""Channels and number of blocks, stage by stage."""

_BERT_BLOCKS: Final = 12
"""Transformer blocks of BERT-base."""

_LINEAR_WIDTHS: Final = (10, 120, 100, 200, 10, 10)
"""Output features of the toy network of fully connected layers."""


def linear(*, batch_size: int = 1) -> Graph:
    """Return the published toy network: six fully connected layers on 784 inputs; 27 nodes."""
    _require_counts(batch_size=batch_size)
    network = Network((batch_size, 784))
    x = network.input
    for k, features in enumerate(_LINEAR_WIDTHS, 1):
        x = network.linear(f"fc{k}", x, features)
        x = network.relu(f"relu{k}", x)
    network.cross_entropy("loss", x, 10)
    return training_graph(network, name="paper/linear", batch_size=batch_size)


def vgg16(*, batch_size: int = 1, image_size: int = 224, classes: int = 1000) -> Graph:
    """Return VGG-16 without batch normalisation, as the published code has it; 81 nodes.

    Parameters
    ----------
    image_size : int
        Height and width of the images, a multiple of 32.
    classes : int
        Outputs of the classifier.
    """
    _require_counts(batch_size=batch_size, image_size=image_size, classes=classes)
    if image_size % 32:
        msg = f"image_size: expected a multiple of 32, got {image_size}"
        raise GraphError(msg)
    network = Network((batch_size, 3, image_size, image_size))
    x = network.input
    for stage, channels in enumerate(_VGG16, 1):
        for k, width in enumerate(channels, 1):
            x = network.conv2d(f"conv{stage}_{k}", x, width, kernel=3, padding=1)
            x = network.relu(f"relu{stage}_{k}", x)
        x = network.pool(f"pool{stage}", x, op="max_pool", window=2, stride=2)
    x = network.flatten("flatten", x)
    for k in (1, 2):
        x = network.linear(f"fc{k}", x, 4096)
        x = network.relu(f"relu_fc{k}", x)
        x = network.dropout(f"dropout{k}", x)
    x = network.linear("fc3", x, classes)
    network.cross_entropy("loss", x, classes)
    return training_graph(network, name="paper/vgg16", batch_size=batch_size)


def vgg16_cifar(*, batch_size: int = 1) -> Graph:
    """Return the published VGG-16 for CIFAR-10: 32 x 32 images, 10 classes; 81 nodes."""
    graph = vgg16(batch_size=batch_size, image_size=32, classes=10)
    return replace(graph, name="paper/vgg16-cifar")


def resnet18(*, batch_size: int = 1) -> Graph:
    """Return the published ResNet-18 for 224 x 224 images and 1,000 classes; 127 nodes.

    A block adds its own first rectifier to its second normalisation; its input goes nowhere else.
    """
    network, x = _imagenet_stem(batch_size)
    for stage, (channels, blocks) in enumerate(_RESNET18, 1):
        for block in range(1, blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            at = f"block{stage}_{block}"
            y = _conv_bn_relu(network, at, 1, x, channels, kernel=3, stride=stride)
            x = network.conv2d(f"{at}.conv2", y, channels, kernel=3, padding=1)
            x = network.batch_norm(f"{at}.bn2", x)
            x = network.add(f"{at}.add", y, x)
            x = network.relu(f"{at}.relu2", x)
    _resnet_head(network, x, window=7, classes=1000)
    return training_graph(network, name="paper/resnet18", batch_size=batch_size)


def resnet50(*, batch_size: int = 1) -> Graph:
    """Return the published ResNet-50 for 224 x 224 images and 1,000 classes; 335 nodes.

    A block adds its first rectifier, a quarter as wide, to its last normalisation.
    """
    network, x = _imagenet_stem(batch_size)
    for stage, (channels, blocks) in enumerate(_RESNET50, 1):
        for block in range(1, blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            at = f"block{stage}_{block}"
            y = _conv_bn_relu(network, at, 1, x, channels, kernel=1, stride=stride)
            x = _conv_bn_relu(network, at, 2, y, channels, kernel=3)
            x = network.conv2d(f"{at}.conv3", x, 4 * channels, kernel=1)
            x = network.batch_norm(f"{at}.bn3", x)
            x = network.add(f"{at}.add", x, y)
            x = network.relu(f"{at}.relu3", x)
    _resnet_head(network, x, window=7, classes=1000)
    return training_graph(network, name="paper/resnet50", batch_size=batch_size)


def resnet18_cifar(*, batch_size: int = 1) -> Graph:
    """Return the published ResNet for CIFAR-10, which it calls ResNet-18; 133 nodes.

    Six blocks of 16, 32 and 64 channels; each has a 3 x 3 convolution with normalisation on its
    shortcut, also where the shape does not change, and a rectifier before the sum.
    """
    _require_counts(batch_size=batch_size)
    network = Network((batch_size, 3, 32, 32))
    x = network.conv2d("conv", network.input, 16, kernel=3, padding=1)
    x = network.batch_norm("bn", x)
    for stage, (channels, blocks) in enumerate(_RESNET18_CIFAR, 1):
        for block in range(1, blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            at = f"block{stage}_{block}"
            y = _conv_bn_relu(network, at, 1, x, channels, kernel=3, stride=stride)
            y = _conv_bn_relu(network, at, 2, y, channels, kernel=3)
            x = network.conv2d(f"{at}.conv3", x, channels, kernel=3, stride=stride, padding=1)
            x = network.batch_norm(f"{at}.bn3", x)
            x = network.add(f"{at}.add", y, x)
            x = network.relu(f"{at}.relu3", x)
    _resnet_head(network, x, window=8, classes=10)
    return training_graph(network, name="paper/resnet18-cifar", batch_size=batch_size)


def bert(
    *,
    blocks: int = _BERT_BLOCKS,
    seq_len: int = 512,
    hidden: int = 768,
    heads: int = 12,
    head_width: int = 64,
) -> Graph:
    """Return the published BERT without embeddings or head: ``16 blocks + 3`` nodes.

    Parameters
    ----------
    blocks : int
        Transformer blocks.
    seq_len : int
        Tokens of the one sample, and the number of classes of the loss.
    hidden : int
        Width of the residual stream.
    heads, head_width : int
        Attention heads and the width of each.

    Notes
    -----
    The second residual of a block starts at the attention's output projection, not at the sum
    behind it. There is no softmax and no layer normalisation. The published code gives this model
    no batch size: it is one sample.
    """
    _require_counts(
        blocks=blocks,
        seq_len=seq_len,
        hidden=hidden,
        heads=heads,
        head_width=head_width,
    )
    network = Network((seq_len, hidden))
    x = network.input
    for block in range(1, blocks + 1):
        at = f"block{block}"
        y = network.query_key_value(f"{at}.qkv", x, heads=heads, head_width=head_width)
        y = network.attention_scores(f"{at}.scores", y)
        y = network.attention_context(f"{at}.context", y, head_width=head_width)
        projection = network.linear(f"{at}.projection", y, hidden)
        y = network.add(f"{at}.add1", x, projection)
        y = network.linear(f"{at}.ffn1", y, 4 * hidden, relu=True)
        y = network.linear(f"{at}.ffn2", y, hidden)
        x = network.add(f"{at}.add2", projection, y)
    network.cross_entropy("loss", x, seq_len)
    name = "paper/bert" if blocks == _BERT_BLOCKS else f"paper/bert-{blocks}"
    return training_graph(network, name=name)


def transformer(*, seq_len: int = 512) -> Graph:
    """Return one block of the published BERT with its loss; 19 nodes."""
    return replace(bert(blocks=1, seq_len=seq_len), name="paper/transformer")


def _imagenet_stem(batch_size: int) -> tuple[Network, PaperLayer]:
    _require_counts(batch_size=batch_size)
    network = Network((batch_size, 3, 224, 224))
    x = network.conv2d("conv", network.input, 64, kernel=7, stride=2, padding=3)
    x = network.batch_norm("bn", x)
    return network, network.pool("pool", x, op="max_pool", window=3, stride=2)


def _conv_bn_relu(
    network: Network, at: str, k: int, x: PaperLayer, channels: int, *, kernel: int, stride: int = 1
) -> PaperLayer:
    """Add the k-th convolution of a block, padded to keep its size, with its two followers."""
    x = network.conv2d(
        f"{at}.conv{k}", x, channels, kernel=kernel, stride=stride, padding=kernel // 2
    )
    x = network.batch_norm(f"{at}.bn{k}", x)
    return network.relu(f"{at}.relu{k}", x)


def _resnet_head(network: Network, x: PaperLayer, *, window: int, classes: int) -> None:
    x = network.pool("pool_out", x, op="avg_pool", window=window, stride=1)
    x = network.flatten("flatten", x)
    x = network.linear("fc", x, classes)
    network.cross_entropy("loss", x, classes)


def _require_counts(**counts: object) -> None:
    faults = [
        f"{name}: expected an integer from 1, got {value!r}"
        for name, value in counts.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    if faults:
        raise GraphError(faults)


MODELS: Final[Mapping[str, Callable[..., Graph]]] = MappingProxyType(
    {
        "paper/bert": bert,
        "paper/linear": linear,
        "paper/resnet18": resnet18,
        "paper/resnet18-cifar": resnet18_cifar,
        "paper/resnet50": resnet50,
        "paper/transformer": transformer,
        "paper/vgg16": vgg16,
        "paper/vgg16-cifar": vgg16_cifar,
    }
)
"""Every model of the published code, by the name of its graph."""
