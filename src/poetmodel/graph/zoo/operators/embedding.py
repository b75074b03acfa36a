"""Embedding."""

from __future__ import annotations

from poetmodel.graph.zoo.declaration import Declaration, Gradient
from poetmodel.graph.zoo.values import Value, Weight


def embedding(name: str, ids: Value, *, rows: int, features: int, item_bytes: int) -> Declaration:
    """Declare the look-up of rows of a table.

    The gradient of the table reads the ids and the arriving gradient and is added row by row to
    the resident buffer; ids have none.

    Parameters
    ----------
    name : str
        Of the node.
    ids : Value, shape (...)
        Row numbers.
    rows, features : int
        Shape of the table.
    item_bytes : int
        Size of an element of the table [B].
    """
    y = ids.made(name, *ids.shape, features, item_bytes=item_bytes)
    table = Weight(name=f"{name}.weight", shape=(rows, features), item_bytes=item_bytes)
    return Declaration(
        name=name,
        op="embedding",
        inputs=(ids,),
        outputs=(y,),
        weights=(table,),
        weight_bytes_moved=y.bytes,
        gradients=(
            Gradient(
                part="weight", of=None, saved=(ids,), flops=y.size, weight_bytes_moved=2 * y.bytes
            ),
        ),
    )
