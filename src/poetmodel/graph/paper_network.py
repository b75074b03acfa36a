"""The operators of the published POET code and its way of making a backward pass.

The published code (github.com/ShishirPatil/poet, files ``poet/power_computation.py`` and
``poet/power_computation_transformer.py``) gives each operator an output shape, a number of floating
point operations and a number of parameters. The rules here give the same figures, right or wrong;
``docs/deviations.md`` of this project says which are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from poetmodel.errors import GraphError
from poetmodel.graph.structure import Graph, Node, Phase, operation

ELEMENT_BYTES: Final = 4
"""Size of one element on every device of the published code [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperLayer:
    """One forward operator with the figures that the published rules give it."""

    name: str
    op: str
    shape: tuple[int, ...]
    flops: int = 0
    parameters: int = 0
    inputs: tuple[str, ...] = ()
    """Names of the layers it reads."""

    @property
    def elements(self) -> int:
        """Elements of its output."""
        return prod(self.shape)

    @property
    def output_bytes(self) -> int:
        """Size of its output [B]."""
        return self.elements * ELEMENT_BYTES


class Network:
    """A forward pass that grows one operator at a time.

    Every method that adds an operator takes the layer that it reads, appends the new layer and
    returns it.

    Parameters
    ----------
    shape : tuple of int
        Shape of the input, batch included where the model has one.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.layers: list[PaperLayer] = []
        """The layers so far, in execution order."""
        self.input = self._append("input", "input", (), shape)
        """The layer that stands for the sample; it costs nothing to make again."""

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

        Its FLOP are ``2 kernel^2 * elements(x) * channels + elements(out)``: the input is counted
        where the output belongs, so a stride of 2 counts four times.
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
        """Add a flattening, which costs 1 FLOP and a new tensor per element."""
        return self._append(name, "flatten", (x,), (x.shape[0], prod(x.shape[1:])), x.elements)

    def linear(self, name: str, x: PaperLayer, features: int, *, relu: bool = False) -> PaperLayer:
        """Add a fully connected layer with bias, and fuse a rectifier into it if requested.

        Its FLOP are ``2 * parameters + features``: those of one row, however many rows `x` has.
        The rectifier is counted for every row.
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
            msg = f"{name}: expected every side of its output to be at least 1, got shape {shape}"
            raise GraphError(msg)
        layer = PaperLayer(
            name=name,
            op=op,
            shape=shape,
            flops=flops,
            parameters=parameters,
            inputs=tuple(layer.name for layer in inputs),
        )
        self.layers.append(layer)
        return layer


def training_graph(network: Network, *, name: str, batch_size: int = 1) -> Graph:
    """Return a network with the backward pass of the published code behind it.

    Parameters
    ----------
    network : Network
        A forward pass that ends in its loss.
    name : str
        Name of the graph.
    batch_size : int
        Samples per training step.

    Returns
    -------
    Graph
        ``2 L - 1`` nodes for ``L`` layers, one output tensor each.

    Notes
    -----
    Walking back from the last layer but one, the gradient node of each layer reads the layer, the
    one after it in the list, and the gradient before it (for the first: the loss itself). Its
    tensor has the shape of the layer after it, and it costs twice the FLOP of the layer itself.
    Branches are not followed: the backward pass is one chain, whatever the network.
    """
    layers = network.layers
    nodes = [_forward_node(layer) for layer in layers]
    upstream = layers[-1].name
    for layer, after in zip(layers[-2::-1], layers[:0:-1], strict=True):
        node = operation(
            f"grad.{layer.name}",
            output_bytes=after.output_bytes,
            op="gradient",
            phase=Phase.BACKWARD.value,
            inputs=tuple(dict.fromkeys((layer.name, after.name, upstream))),
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


def _forward_node(layer: PaperLayer) -> Node:
    phases = {"input": Phase.INPUT, "cross_entropy": Phase.LOSS}
    return operation(
        layer.name,
        output_bytes=layer.output_bytes,
        op=layer.op,
        phase=phases.get(layer.op, Phase.FORWARD).value,
        inputs=layer.inputs,
        flops=layer.flops,
    )
