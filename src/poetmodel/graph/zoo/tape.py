"""The tape: records a forward pass operator by operator and makes the training graph of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypedDict

from poetmodel.errors import InputError
from poetmodel.graph.structure import Graph, Node, Phase, Tensor
from poetmodel.graph.zoo.backward import BackwardPass
from poetmodel.graph.zoo.optimizers import OPTIMIZERS, update_node
from poetmodel.graph.zoo.values import INDEX_BYTES, ITEM_BYTES, Value, Weight, require_counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.graph.zoo.declaration import Declaration


class Settings(TypedDict, total=False):
    """Keyword arguments that every model of the zoo takes beside its own."""

    batch_size: int
    """Samples per training step; 1 by default."""
    dtype: Literal["float32", "float16", "int8"]
    """Element type of activations, parameters and gradients; ``"float32"`` by default."""
    fused_backward: bool
    """One backward node per operator, as POET has it, in place of one per gradient."""
    optimizer: Literal["sgd", "adam"] | None
    """Add an update node with this rule; None (the default) ends with the gradients."""
    input_on_aux: bool
    """Whether samples and labels lie on auxiliary storage from the start."""


class Tape:
    """Record operators in execution order, then add their backward pass.

    Parameters
    ----------
    name : str
        Of the graph.
    batch_size, dtype, fused_backward, optimizer, input_on_aux
        As the keys of `Settings`.

    Raises
    ------
    InputError
        With every setting that is not accepted.

    Examples
    --------
    >>> from poetmodel.graph.zoo.operators import cross_entropy, linear
    >>> tape = Tape("tiny", batch_size=2)
    >>> y = tape.record(linear("fc", tape.input("input", 2, 8), features=3))
    >>> graph = tape.differentiate(cross_entropy("loss", y, tape.indices("labels", 2)))
    >>> [node.name for node in graph.nodes]
    ['input', 'fc', 'labels', 'loss', 'loss.grad_input', 'fc.grad_weight']
    """

    def __init__(
        self,
        name: str,
        *,
        batch_size: int = 1,
        dtype: str = "float32",
        fused_backward: bool = False,
        optimizer: str | None = None,
        input_on_aux: bool = False,
    ) -> None:
        require_counts(batch_size=batch_size)
        _require_known("dtype", dtype, ITEM_BYTES)
        if optimizer is not None:
            _require_known("optimizer", optimizer, OPTIMIZERS)
        self.name = name
        self.batch_size = batch_size
        self.dtype = dtype
        self.item_bytes = ITEM_BYTES[dtype]
        """Size of an element of `dtype` [B]."""
        self._fused = fused_backward
        self._optimizer = optimizer
        self._on_aux = input_on_aux
        self._nodes: list[Node] = []
        self._recorded: list[Declaration] = []
        self._weights: dict[str, Weight] = {}

    def input(self, name: str, *shape: int) -> Value:
        """Add a node that brings samples.

        It is not recomputable: a sample comes once. To have it again, keep it or page it.
        """
        return self._input(name, shape, self.item_bytes)

    def indices(self, name: str, *shape: int) -> Value:
        """Add a node that brings labels or token ids; as `input`."""
        return self._input(name, shape, INDEX_BYTES)

    def _input(self, name: str, shape: tuple[int, ...], item_bytes: int) -> Value:
        value = Value(name=name, shape=shape, item_bytes=item_bytes, differentiable=False)
        self._nodes.append(
            Node(
                name=name,
                op="input",
                phase=Phase.INPUT,
                outputs=(Tensor(name=name, bytes=value.bytes),),
                recomputable=False,
                on_aux=self._on_aux,
            )
        )
        return value

    def record(self, declaration: Declaration) -> Value:
        """Add the forward node of an operator.

        Returns
        -------
        Value
            The operator's result.

        Raises
        ------
        InputError
            If operators share a weight but not its shape.
        """
        for weight in declaration.weights:
            if self._weights.setdefault(weight.name, weight) != weight:
                msg = f"{declaration.name}: the weight {weight.name!r} is shared in two shapes"
                raise InputError(msg)
        self._recorded.append(declaration)
        self._nodes.append(_forward_node(declaration))
        wanted = bool(declaration.weights) or any(x.differentiable for x in declaration.inputs)
        return replace(declaration.outputs[0], differentiable=wanted)

    def differentiate(self, loss: Declaration) -> Graph:
        """Record the loss, add the backward pass in reverse order, and return the graph.

        Parameters
        ----------
        loss : Declaration
            What is differentiated; its own gradient is 1 and no tensor.

        Returns
        -------
        Graph
            Forward pass, loss, backward pass and, with an optimizer, the update.

        Raises
        ------
        InputError
            If `loss` does not declare a loss.
        """
        if loss.phase is not Phase.LOSS:
            msg = f"{loss.name}: expected a loss, got phase {loss.phase.value!r}"
            raise InputError(msg)
        self.record(loss)
        updated = self._optimizer is not None
        backward = BackwardPass(self._recorded, fused=self._fused, updated=updated)
        nodes = [*self._nodes, *backward.nodes]
        parameters = sum(weight.size for weight in self._weights.values())
        state_bytes = 0
        if self._optimizer is not None:
            state_bytes = OPTIMIZERS[self._optimizer].state_bytes * parameters
            nodes.append(
                update_node(
                    self._optimizer,
                    backward.weight_gradients,
                    parameters=parameters,
                    item_bytes=self.item_bytes,
                )
            )
        return Graph(
            name=self.name,
            nodes=tuple(nodes),
            batch_size=self.batch_size,
            dtype=self.dtype,
            resident_bytes={
                "parameters": parameters * self.item_bytes,
                "gradients": parameters * self.item_bytes,
                "optimizer": state_bytes,
            },
            parameters=parameters,
            forward_macs=sum(declaration.macs for declaration in self._recorded),
        )


def _forward_node(declaration: Declaration) -> Node:
    read = {value.name: value.bytes for value in declaration.inputs}
    weight_bytes_moved = declaration.weight_bytes_moved
    if weight_bytes_moved is None:
        weight_bytes_moved = sum(weight.bytes for weight in declaration.weights)
    return Node(
        name=declaration.name,
        op=declaration.op,
        phase=declaration.phase,
        inputs=tuple(read),
        outputs=tuple(Tensor(name=made.name, bytes=made.bytes) for made in declaration.outputs),
        workspace_bytes=declaration.workspace_bytes,
        flops=declaration.flops,
        recomputable=declaration.recomputable,
        bytes_moved=sum(read.values())
        + sum(made.bytes for made in declaration.outputs)
        + weight_bytes_moved,
    )


def _require_known(setting: str, value: str, accepted: Mapping[str, object]) -> None:
    if value not in accepted:
        msg = f"{setting}: expected one of {', '.join(accepted)}, got {value!r}"
        raise InputError(msg)
