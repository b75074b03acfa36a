"""The training graphs of the published POET code, for comparison with the zoo's correct ones.

Operators, FLOP rules, four bytes per element, and a backward pass that is one reversed chain are
those of github.com/ShishirPatil/poet (``poet/architectures``, ``poet/power_computation.py``,
``poet/power_computation_transformer.py``), with its faults, which ``docs/concepts/deviations.md``
lists. There, the time and energy of an operator are its FLOP over a device's FLOP/s and FLOP/J, and
a transfer takes a latency plus bytes over rate, times a power for its energy, so that
`poetmodel.device.Costs.estimate` returns the same costs with the ``paper-*`` devices.

Parameter `batch_size` is the number of samples in a training step; the published code of the
transformers has none. All functions raise `GraphError` for sizes that are out of range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.errors import GraphError
from poetmodel.graph import Graph, Phase, operation
from poetmodel.graph.zoo.declaration import require_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ELEMENT_BYTES: Final = 4
"""Size of one element on every device of the published code [B]."""


@dataclass(frozen=True, slots=True)
class PaperLayer:
    """One forward operator with its sizes and FLOP by the published rules."""

    name: str
    op: str
    shape: tuple[int, ...]
    flops: int
    parameters: int
    inputs: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Number of elements of its output."""
        return prod(self.shape)


class Network:
    """A forward pass that grows operator by operator; each method appends one and returns it."""

    def __init__(self, *shape: int) -> None:
        self.layers: list[PaperLayer] = []
        self.input = self._append("input", "input", (), shape)
        """The layer of the samples, which has no FLOP."""

    def conv2d(
        self,
        name: str,
        x: PaperLayer,
        channels: int,
        *,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
    ) -> PaperLayer:
        """Add a square convolution with bias.

        Its FLOP are ``2 kernel^2 * elements(x) * channels + elements(out)``: the rule counts
        elements of the input in place of the output, so that a stride of 2 counts four times.
        """
        batch, features, height, width = x.shape
        height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        shape = (batch, channels, height, width)
        weights = features * channels * kernel**2
        flops = 2 * kernel**2 * x.elements * channels + prod(shape)
        return self._append(name, "conv2d", (x,), shape, flops, parameters=weights + channels)

    def batch_norm(self, name: str, x: PaperLayer) -> PaperLayer:
        """Add a batch normalisation: 2 FLOP per element, 4 parameters per channel."""
        return self._append(
            name, "batch_norm", (x,), x.shape, 2 * x.elements, parameters=4 * x.shape[1]
        )

    def relu(self, name: str, x: PaperLayer) -> PaperLayer:
        """Add a rectifier: 1 FLOP per element."""
        return self._append(name, "relu", (x,), x.shape, x.elements)

    def dropout(self, name: str, x: PaperLayer) -> PaperLayer:
        """Add a dropout: 1 FLOP per element, and no mask."""
        return self._append(name, "dropout", (x,), x.shape, x.elements)

    def pool(self, name: str, x: PaperLayer, *, op: str, window: int, stride: int) -> PaperLayer:
        """Add a maximum or average pooling without padding: ``2 window^2`` FLOP per output."""
        batch, channels, *sides = x.shape
        shape = (batch, channels, *((side - window) // stride + 1 for side in sides))
        return self._append(name, op, (x,), shape, 2 * window**2 * prod(shape))

    def flatten(self, name: str, x: PaperLayer) -> PaperLayer:
        """Add a flattening: 1 FLOP per element, and a new tensor."""
        return self._append(name, "flatten", (x,), (x.shape[0], prod(x.shape[1:])), x.elements)

    def linear(self, name: str, x: PaperLayer, features: int, *, relu: bool = False) -> PaperLayer:
        """Add a fully connected layer with bias, with a fused rectifier if `relu`.

        Its FLOP are ``2 * parameters + features``: those of one row, for any number of rows. The
        rectifier is counted for every row.
        """
        rows, width = x.shape
        parameters = (width + 1) * features
        flops = 2 * parameters + features + (rows * features if relu else 0)
        op = "linear_relu" if relu else "linear"
        return self._append(name, op, (x,), (rows, features), flops, parameters=parameters)

    def add(self, name: str, x: PaperLayer, y: PaperLayer) -> PaperLayer:
        """Add an elementwise sum, shaped like its first input."""
        return self._append(name, "add", (x, y), x.shape, x.elements)

    def query_key_value(
        self, name: str, x: PaperLayer, *, heads: int, head_width: int
    ) -> PaperLayer:
        """Add the three projections of an attention as one operator, 1 FLOP per MAC."""
        rows, width = x.shape
        weights = 3 * width * head_width * heads
        shape = (3 * rows, head_width, heads)
        return self._append(name, "qkv", (x,), shape, rows * weights, parameters=weights)

    def attention_scores(self, name: str, qkv: PaperLayer) -> PaperLayer:
        """Add the scores of an attention: 1 FLOP per MAC and 2 per element for mask and dropout."""
        rows, head_width, heads = qkv.shape[0] // 3, *qkv.shape[1:]
        shape = (rows, rows, heads)
        flops = rows * rows * head_width * heads + 2 * prod(shape)
        return self._append(name, "attention_scores", (qkv,), shape, flops)

    def attention_context(self, name: str, scores: PaperLayer, *, head_width: int) -> PaperLayer:
        """Add scores times values: 2 FLOP per MAC, and the values are not among its inputs."""
        rows, _, heads = scores.shape
        flops = 2 * scores.elements * head_width
        return self._append(name, "attention_context", (scores,), (rows, head_width * heads), flops)

    def cross_entropy(self, name: str, x: PaperLayer, classes: int) -> PaperLayer:
        """Add the loss: a vector over the classes, ``classes`` FLOP per element of its input."""
        return self._append(name, "cross_entropy", (x,), (classes,), x.elements * classes)

    def _append(
        self,
        name: str,
        op: str,
        inputs: tuple[PaperLayer, ...],
        shape: tuple[int, ...],
        flops: int = 0,
        *,
        parameters: int = 0,
    ) -> PaperLayer:
        if min(shape) < 1:
            raise GraphError(
                f"{name}: expected every side of its output to be at least 1, got shape {shape}"
            )
        input_names = tuple(layer.name for layer in inputs)
        layer = PaperLayer(name, op, shape, flops, parameters, input_names)
        self.layers.append(layer)
        return layer


def _build_training_graph(network: Network, name: str, *, batch_size: int = 1) -> Graph:
    """Return the graph of a network, which ends in its loss, and of the published backward pass.

    Walking back from the last layer but one, the gradient node of each layer reads the layer, the
    next layer in the list, and the previous gradient (the first gradient node: the loss). Its
    tensor has the shape of the next layer, and its FLOP are twice those of the layer itself.
    Branches are not followed: the backward pass of every network is one chain.
    """
    layers = network.layers
    phases = {"input": Phase.INPUT, "cross_entropy": Phase.LOSS}
    nodes = [
        operation(
            layer.name,
            output_bytes=layer.elements * ELEMENT_BYTES,
            op=layer.op,
            phase=phases.get(layer.op, Phase.FORWARD).value,
            inputs=layer.inputs,
            flops=layer.flops,
        )
        for layer in layers
    ]
    upstream = layers[-1].name
    for layer, next_layer in zip(layers[-2::-1], layers[:0:-1], strict=True):
        node = operation(
            f"grad.{layer.name}",
            output_bytes=next_layer.elements * ELEMENT_BYTES,
            op="gradient",
            phase=Phase.BACKWARD.value,
            inputs=tuple(dict.fromkeys((layer.name, next_layer.name, upstream))),
            flops=2 * layer.flops,
        )
        nodes.append(node)
        upstream = node.name
    parameters = sum(layer.parameters for layer in layers)
    weights_bytes = parameters * ELEMENT_BYTES
    return Graph(
        name=name,
        nodes=tuple(nodes),
        batch_size=batch_size,
        resident_bytes={"parameters": weights_bytes, "gradients": weights_bytes},
        parameters=parameters,
    )


_VGG16: Final = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions between two poolings."""

_RESNET18: Final = ((64, 2), (128, 2), (256, 2), (512, 2))
_RESNET50: Final = ((64, 3), (128, 4), (256, 6), (512, 3))
_RESNET18_CIFAR: Final = ((16, 2), (32, 2), (64, 2))
"""Channels and number of blocks of each stage, here and in the two networks above."""

_BERT_BLOCKS: Final = 12
"""Transformer blocks of BERT-base."""

_LINEAR_WIDTHS: Final = (10, 120, 100, 200, 10, 10)
"""Output features of the toy network of fully connected layers."""


def linear(*, batch_size: int = 1) -> Graph:
    """Return the published toy network: six fully connected layers on 784 inputs; 27 nodes."""
    require_counts(batch_size=batch_size)
    network = Network(batch_size, 784)
    x = network.input
    for k, features in enumerate(_LINEAR_WIDTHS, 1):
        x = network.linear(f"fc{k}", x, features)
        x = network.relu(f"relu{k}", x)
    network.cross_entropy("loss", x, 10)
    return _build_training_graph(network, "paper/linear", batch_size=batch_size)


def vgg16(*, batch_size: int = 1, image_size: int = 224, classes: int = 1000) -> Graph:
    """Return the published VGG-16, which has no batch normalisation; 81 nodes.

    Images are square. Raises `GraphError` unless their side is a multiple of 32.
    """
    require_counts(batch_size=batch_size, image_size=image_size, classes=classes)
    if image_size % 32:
        raise GraphError(f"image_size: expected a multiple of 32, got {image_size}")
    network = Network(batch_size, 3, image_size, image_size)
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
    return _build_training_graph(network, "paper/vgg16", batch_size=batch_size)


def vgg16_cifar(*, batch_size: int = 1) -> Graph:
    """Return the published VGG-16 for CIFAR-10: 32 x 32 images, 10 classes; 81 nodes."""
    graph = vgg16(batch_size=batch_size, image_size=32, classes=10)
    return replace(graph, name="paper/vgg16-cifar")


def resnet18(*, batch_size: int = 1) -> Graph:
    """Return the published ResNet-18 for 224 x 224 images and 1,000 classes; 127 nodes.

    A block adds its own first rectifier to its second normalisation; it has no other shortcut.
    """
    network, x = _make_imagenet_stem(batch_size)
    for block, channels, stride in _list_blocks(_RESNET18):
        y = _add_conv_bn_relu(network, block, 1, x, channels, kernel=3, stride=stride)
        x = network.conv2d(f"{block}.conv2", y, channels, kernel=3, padding=1)
        x = network.batch_norm(f"{block}.bn2", x)
        x = network.add(f"{block}.add", y, x)
        x = network.relu(f"{block}.relu2", x)
    _add_resnet_head(network, x, window=7, classes=1000)
    return _build_training_graph(network, "paper/resnet18", batch_size=batch_size)


def resnet50(*, batch_size: int = 1) -> Graph:
    """Return the published ResNet-50 for 224 x 224 images and 1,000 classes; 335 nodes.

    A block adds its first rectifier, a quarter as wide, to its last normalisation.
    """
    network, x = _make_imagenet_stem(batch_size)
    for block, channels, stride in _list_blocks(_RESNET50):
        y = _add_conv_bn_relu(network, block, 1, x, channels, kernel=1, stride=stride)
        x = _add_conv_bn_relu(network, block, 2, y, channels, kernel=3)
        x = network.conv2d(f"{block}.conv3", x, 4 * channels, kernel=1)
        x = network.batch_norm(f"{block}.bn3", x)
        x = network.add(f"{block}.add", x, y)
        x = network.relu(f"{block}.relu3", x)
    _add_resnet_head(network, x, window=7, classes=1000)
    return _build_training_graph(network, "paper/resnet50", batch_size=batch_size)


def resnet18_cifar(*, batch_size: int = 1) -> Graph:
    """Return the ResNet for CIFAR-10 that the published code calls ResNet-18; 133 nodes.

    Six blocks of 16, 32 and 64 channels; each has a 3 x 3 convolution with normalisation on its
    shortcut, also where the shape does not change, and a rectifier before the sum.
    """
    require_counts(batch_size=batch_size)
    network = Network(batch_size, 3, 32, 32)
    x = network.conv2d("conv", network.input, 16, kernel=3, padding=1)
    x = network.batch_norm("bn", x)
    for block, channels, stride in _list_blocks(_RESNET18_CIFAR):
        y = _add_conv_bn_relu(network, block, 1, x, channels, kernel=3, stride=stride)
        y = _add_conv_bn_relu(network, block, 2, y, channels, kernel=3)
        x = network.conv2d(f"{block}.conv3", x, channels, kernel=3, stride=stride, padding=1)
        x = network.batch_norm(f"{block}.bn3", x)
        x = network.add(f"{block}.add", y, x)
        x = network.relu(f"{block}.relu3", x)
    _add_resnet_head(network, x, window=8, classes=10)
    return _build_training_graph(network, "paper/resnet18-cifar", batch_size=batch_size)


def bert(
    *,
    blocks: int = _BERT_BLOCKS,
    seq_len: int = 512,
    hidden: int = 768,
    heads: int = 12,
    head_width: int = 64,
) -> Graph:
    """Return the published BERT without embeddings or head: ``16 blocks + 3`` nodes.

    The loss has as many classes as there are tokens. The second residual of a block starts at the
    attention's output projection, not at the sum behind it. There is no softmax and no layer
    normalisation. The published model has no batch size: it is one sample.
    """
    require_counts(
        blocks=blocks, seq_len=seq_len, hidden=hidden, heads=heads, head_width=head_width
    )
    network = Network(seq_len, hidden)
    x = network.input
    for block in range(1, blocks + 1):
        prefix = f"block{block}"
        y = network.query_key_value(f"{prefix}.qkv", x, heads=heads, head_width=head_width)
        y = network.attention_scores(f"{prefix}.scores", y)
        y = network.attention_context(f"{prefix}.context", y, head_width=head_width)
        projection = network.linear(f"{prefix}.projection", y, hidden)
        y = network.add(f"{prefix}.add1", x, projection)
        y = network.linear(f"{prefix}.ffn1", y, 4 * hidden, relu=True)
        y = network.linear(f"{prefix}.ffn2", y, hidden)
        x = network.add(f"{prefix}.add2", projection, y)
    network.cross_entropy("loss", x, seq_len)
    name = "paper/bert" if blocks == _BERT_BLOCKS else f"paper/bert-{blocks}"
    return _build_training_graph(network, name)


def transformer(*, seq_len: int = 512) -> Graph:
    """Return one block of the published BERT with its loss; 19 nodes."""
    return replace(bert(blocks=1, seq_len=seq_len), name="paper/transformer")


def _list_blocks(stages: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int, int]]:
    """Yield name, channels and stride of each residual block; later stages begin with stride 2."""
    for stage, (channels, blocks) in enumerate(stages, 1):
        for block in range(1, blocks + 1):
            yield f"block{stage}_{block}", channels, 2 if stage > 1 and block == 1 else 1


def _make_imagenet_stem(batch_size: int) -> tuple[Network, PaperLayer]:
    require_counts(batch_size=batch_size)
    network = Network(batch_size, 3, 224, 224)
    x = network.conv2d("conv", network.input, 64, kernel=7, stride=2, padding=3)
    x = network.batch_norm("bn", x)
    return network, network.pool("pool", x, op="max_pool", window=3, stride=2)


def _add_conv_bn_relu(
    network: Network,
    block: str,
    index: int,
    x: PaperLayer,
    channels: int,
    *,
    kernel: int,
    stride: int = 1,
) -> PaperLayer:
    """Add the k-th convolution of a block, its batch norm and rectifier; return the rectifier.

    With a stride of 1, the padding preserves the size.
    """
    x = network.conv2d(
        f"{block}.conv{index}", x, channels, kernel=kernel, stride=stride, padding=kernel // 2
    )
    x = network.batch_norm(f"{block}.bn{index}", x)
    return network.relu(f"{block}.relu{index}", x)


def _add_resnet_head(network: Network, x: PaperLayer, *, window: int, classes: int) -> None:
    x = network.pool("pool_out", x, op="avg_pool", window=window, stride=1)
    x = network.flatten("flatten", x)
    x = network.linear("fc", x, classes)
    network.cross_entropy("loss", x, classes)


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
"""Function that builds each model of the published code, by the name of its graph."""
