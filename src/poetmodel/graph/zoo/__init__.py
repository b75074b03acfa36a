"""Training graphs of known models, by reverse-mode differentiation of their operators.

`MODELS` has them by their public names. A model of one's own is a `Tape` and operators of
`poetmodel.graph.zoo.operators`.

Notes
-----
What the figures mean:

- A multiply-accumulate is 2 FLOP. Every other addition, multiplication, comparison, division and
  elementary function is 1. `Graph.forward_macs` counts convolutions, linear layers and matrix
  products of the forward pass.
- ``bytes_moved`` is the least traffic: each tensor and weight that an operator reads, once, and
  each that it writes, once.
- Workspace is 0: kernels are taken to be direct ones, which no operator here forbids.
- Weights, their gradients and the optimizer's state are resident and no tensors. A weight gradient
  has a node that outputs 0 bytes and writes the resident buffer. Running statistics of batch norm
  are not counted.
- A flatten, reshape, or split into heads is a view: the same tensor under another shape, without
  a node. Nothing is computed in place.
- Masks are 1 byte an element, places in a pooling window 1 byte, labels and token ids 4 bytes;
  statistics and the loss are single precision whatever the element type is.
- The order is forward pass, loss, backward pass from the last operator to the first; of one
  operator the weight gradient comes first, after which its input may go.
- Samples and labels come once: their nodes are not recomputable. Labels come right before the
  loss.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo.bert import bert_base, transformer
from poetmodel.graph.zoo.images import (
    mlp,
    mobilenetv2,
    resnet18,
    resnet18_cifar,
    resnet50,
    vgg16,
    vgg16_cifar,
)
from poetmodel.graph.zoo.tape import Tape, TapeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.graph.structure import Graph

MODELS: Final[Mapping[str, Callable[..., Graph]]] = MappingProxyType(
    {
        "mlp": mlp,
        "vgg16": vgg16,
        "vgg16-cifar": vgg16_cifar,
        "resnet18": resnet18,
        "resnet18-cifar": resnet18_cifar,
        "resnet50": resnet50,
        "mobilenetv2": mobilenetv2,
        "bert-base": bert_base,
        "transformer": transformer,
    }
)
"""The models by their public names, each a function of keyword arguments."""

__all__ = [
    "MODELS",
    "Tape",
    "TapeOptions",
    "bert_base",
    "mlp",
    "mobilenetv2",
    "resnet18",
    "resnet18_cifar",
    "resnet50",
    "transformer",
    "vgg16",
    "vgg16_cifar",
]
