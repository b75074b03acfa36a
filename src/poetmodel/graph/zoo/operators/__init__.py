"""The operators of the zoo, each a function that declares one use of it.

A new operator is one function more: it states shapes, FLOP, memory traffic, workspace, weights and
the parts of its backward as a `Declaration`, and `Tape.record` makes the nodes.
Flattening and reshaping are none: `Value.flatten` and `Value.view` cost nothing and add no node.
"""

from poetmodel.graph.zoo.operators.elementwise import (
    activation,
    add,
    dropout,
    dropout_mask,
    scale,
)
from poetmodel.graph.zoo.operators.embedding import embedding
from poetmodel.graph.zoo.operators.normalization import batch_norm, layer_norm
from poetmodel.graph.zoo.operators.pooling import avg_pool, global_avg_pool, max_pool, select
from poetmodel.graph.zoo.operators.probabilities import cross_entropy, softmax
from poetmodel.graph.zoo.operators.products import conv2d, linear, matmul

__all__ = [
    "activation",
    "add",
    "avg_pool",
    "batch_norm",
    "conv2d",
    "cross_entropy",
    "dropout",
    "dropout_mask",
    "embedding",
    "global_avg_pool",
    "layer_norm",
    "linear",
    "matmul",
    "max_pool",
    "scale",
    "select",
    "softmax",
]
