"""A small step for export, written by hand: no PyTorch is needed to make it."""

from dataclasses import replace

import numpy as np

from kit.worked import state, update
from poetmodel.export.step import (
    Buffer,
    Call,
    DataType,
    LoweredStep,
    NamedTensor,
    Ref,
    ScaledLearningRate,
)
from poetmodel.graph import Graph, Node, Phase, Tensor

ROWS, COLUMNS = 12, 16


def linear_step():
    """Return y = w x, of which y is the gradient, and an update of w; its loss is y[0]."""
    sizes = {"x": COLUMNS, "w": ROWS * COLUMNS, "y": ROWS, "g": ROWS * COLUMNS}
    weight_bytes = 4 * sizes["w"]
    y, g = Tensor(name="y", bytes=4 * ROWS), Tensor(name="g", bytes=weight_bytes)
    gradient = {"op": "mm", "phase": Phase.BACKWARD, "inputs": ("y",), "outputs": (g,)}
    nodes = (
        state("w", weight_bytes),
        Node(name="linear", op="mm", phase=Phase.FORWARD, inputs=("w",), outputs=(y,)),
        Node(name="gradient", **gradient),
        replace(update("update", "g", w=weight_bytes), inputs=("w", "g")),
    )
    w, x, y, g = map(Ref, "wxyg")
    calls = (
        (),
        (Call("pm_mm", (y, w, x, ROWS, COLUMNS, 1, 1, COLUMNS, 1, 1, 1, 0)),),
        (Call("pm_mm", (g, y, x, ROWS, 1, COLUMNS, COLUMNS, 1, 1, COLUMNS, 1, 0)),),
        (Call("pm_sgd", (w, g, sizes["w"], ScaledLearningRate(), 1.0, 0.0)),),
    )
    real = DataType.REAL
    step = LoweredStep(
        graph=Graph(name="linear", nodes=nodes),
        calls=calls,
        buffers={name: Buffer(elements=size, type=real) for name, size in sizes.items()},
        inputs=(NamedTensor(name="x", shape=(COLUMNS,), type=real, pieces=(x,)),),
        states=(NamedTensor(name="w", shape=(ROWS, COLUMNS), type=real, pieces=(w,)),),
        gradients=(),
        loss=y,
        values={"w": np.linspace(-1, 1, sizes["w"], dtype="<f4")},
        learning_rate=0.1,
    )
    return step.with_nodes(nodes, calls)
