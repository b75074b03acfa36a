"""Training graphs of known networks, by reverse-mode differentiation of their operators.

`MODELS` maps public names to functions. To build another network, use a `Tape` and the operators of
`poetmodel.graph.zoo.operators`.

Notes
-----
Work, memory traffic and memory are counted as follows:

- A multiply-accumulate is 2 FLOP. Every other addition, multiplication, comparison, division and
  elementary function is 1. The bias of a convolution or linear layer is free, since sums start from
  it. `Graph.forward_macs` counts convolutions, linear layers and matrix products of the forward
  pass.
- ``bytes_moved`` is the minimum traffic: each tensor and weight that an operator reads or writes,
  counted once per read and write. An embedding reads one row of its table per id, and its backward
  node adds to one row per id; with `state`, that node also writes the whole gradient.
- Workspace is 0: kernels are assumed to be direct ones, which exist for every operator here.
- Without `state`, weights, their gradients and the optimizer's state are resident bytes, not
  tensors. A weight gradient counts 0 bytes, since its node writes the resident buffer. Running
  statistics of batch norm are not counted.
- A flatten, reshape, or split into heads is a view: the same tensor with another shape, without a
  node. No operator works in place without `in_place`.
- Dropout masks have 1 byte per element, labels and token ids 4 bytes. Positions in a pooling window
  have 1 byte, or 4 in windows of more than 256 elements. Statistics and the loss are single
  precision for every element type.
- The order is forward pass, loss, backward pass from the last operator to the first. For each
  operator, the weight gradient precedes the input gradient, so that the input can be freed. With
  `fused_backward`, one node computes both.
- Samples, token ids and labels are provided once: their nodes are not recomputable. Labels are
  provided right before the loss.

Differences with `state`:

- Every parameter, every moment of the optimizer and every running statistic is a state tensor,
  whose node comes before its first reader. Every weight gradient is a tensor of its full size. No
  bytes are resident.
- For each operator, the input gradient comes first, since it reads the weight. Then the update
  follows each weight gradient, so that the gradient and the weight can be freed early. If several
  operators share a weight, the gradients are summed and the update follows the last.
- The backward pass of a norm is one node with all its gradients, which need the same sums.
- A node after each batch norm updates the running statistics from the batch statistics. The batch
  norm does not read running statistics, so it is recomputable; the update of the statistics is not.
- A batch norm whose weight is not trained normalizes with its running statistics, as in
  evaluation. With ``state="frozen"`` the graph is the forward pass and the loss.
- ``train="last-N"`` counts operators with weights except norms; a norm belongs to the operator
  before it. If `train` is not ``"all"``, dropout masks are packed to 1 bit per element, and some
  results of ReLU and ReLU6 are saved as such masks (`poetmodel.graph.zoo.masks`).
- Tiles split only weights, their gradients and moments, and the running statistics of a batch norm
  whose weight is not trained. The forward pass and the input gradient read all tiles of a layer in
  one node, so the whole weight is in RAM at that step, unless the core can read it from storage.
  Learning rate and step count are not tensors.
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
"""Functions that build the networks, by public name; all arguments are keywords."""

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
