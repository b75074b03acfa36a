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
- Without `state`, weights, their gradients and the optimizer's state are resident and no tensors.
  A weight gradient has a node that outputs 0 bytes and writes the resident buffer. Running
  statistics of batch norm are not counted.
- A flatten, reshape, or split into heads is a view: the same tensor under another shape, without
  a node. Nothing is computed in place without `in_place`.
- Masks are 1 byte an element, places in a pooling window 1 byte, labels and token ids 4 bytes;
  statistics and the loss are single precision whatever the element type is.
- The order is forward pass, loss, backward pass from the last operator to the first; of one
  operator the weight gradient comes first, after which its input may go.
- Samples and labels come once: their nodes are not recomputable. Labels come right before the
  loss.

What is different with `state`:

- Every parameter, every moment of the optimizer and every running statistic is a state tensor, in
  front of its first reader, and every weight gradient a tensor with its bytes. Nothing is resident.
- Of one operator the input gradient comes first, since it reads the weight. Then each weight
  gradient is followed by its update, so that a weight and its gradient are soon done with. Of a
  weight that several operators share, the gradients are summed and the update follows the last.
- The backward of a norm is one node with all its gradients: they need the same sums.
- A node after each batch norm renews its running statistics from the statistics of the batch. The
  batch norm reads none of them and so may be computed again; the renewal may not.
- A batch norm whose weight is not trained normalizes with its running statistics, as in
  evaluation. With ``state="frozen"`` the graph is the forward pass and the loss.
- ``train="last-N"`` counts operators with weights but norms, which belong to what is before them.
- Tiles split weights, their gradients and moments alone: the forward pass and the gradient of the
  input read all tiles of a layer in one node, so that its weight is in RAM whole at that step,
  unless the core can read it on storage. The learning rate and the number of the step are no
  tensors.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo.bert import bert_base, transformer
from poetmodel.graph.zoo.images import (
    mlp,
    mobilenetv2,
    mobilenetv2_035,
    resnet18,
    resnet18_cifar,
    resnet50,
    vgg16,
    vgg16_cifar,
)
from poetmodel.graph.zoo.tape import Tape, TapeOptions
from poetmodel.graph.zoo.tiny import autoencoder, ds_cnn, mobilenetv1_vww, resnet8

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
        "mobilenetv2-035": mobilenetv2_035,
        "bert-base": bert_base,
        "transformer": transformer,
        "resnet8": resnet8,
        "mobilenetv1-vww": mobilenetv1_vww,
        "ds-cnn": ds_cnn,
        "autoencoder": autoencoder,
    }
)
"""The models by their public names, each a function of keyword arguments."""

__all__ = [
    "MODELS",
    "Tape",
    "TapeOptions",
    "autoencoder",
    "bert_base",
    "ds_cnn",
    "mlp",
    "mobilenetv1_vww",
    "mobilenetv2",
    "mobilenetv2_035",
    "resnet8",
    "resnet18",
    "resnet18_cifar",
    "resnet50",
    "transformer",
    "vgg16",
    "vgg16_cifar",
]
