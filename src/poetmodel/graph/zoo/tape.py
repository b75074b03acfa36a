"""The tape: records a forward pass operator by operator and makes the training graph of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from poetmodel.errors import InputError
from poetmodel.graph.structure import Graph, Node, Phase, Tensor
from poetmodel.graph.zoo import operators
from poetmodel.graph.zoo.declaration import (
    FLOAT_BYTES,
    INDEX_BYTES,
    ITEM_BYTES,
    Declaration,
    Gradient,
    Value,
    Weight,
    require_counts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TapeOptions(TypedDict, total=False):
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

    Its options are the keys of `TapeOptions`; one that is not accepted raises `InputError`.

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
        self._fused = fused_backward
        self._optimizer = optimizer
        self._on_aux = input_on_aux
        self._nodes: list[Node] = []
        self._recorded: list[Declaration] = []
        self._weights: dict[str, Weight] = {}

    def indices(self, name: str, *shape: int) -> Value:
        """Add a node that brings labels or token ids; as `input`."""
        return self.input(name, *shape, item_bytes=INDEX_BYTES)

    def input(self, name: str, *shape: int, item_bytes: int | None = None) -> Value:
        """Add a node that brings samples, of the tape's element type by default.

        It is not recomputable: a sample comes once. To have it again, keep it or page it.
        """
        item_bytes = item_bytes or self.item_bytes
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
        """Add the forward node of an operator and return its result."""
        for weight in declaration.weights:
            if self._weights.setdefault(weight.name, weight) != weight:
                raise InputError(
                    f"{declaration.name}: the weight {weight.name!r} is shared in two shapes"
                )
        self._recorded.append(declaration)
        self._nodes.append(_forward_node(declaration))
        wanted = bool(declaration.weights) or any(x.differentiable for x in declaration.inputs)
        return replace(declaration.outputs[0], differentiable=wanted)

    # -- groups of operators that several models share ----------------------------------------

    def image(self, image_size: int, *, channels: int = 3) -> Value:
        """Add a batch of square images."""
        return self.input("input", self.batch_size, channels, image_size, image_size)

    def conv_bn(self, x: Value, names: tuple[str, str], *, kernel: int, **sizes: int) -> Value:
        """Add a convolution without bias that keeps the size (over the stride), and its batch norm.

        `sizes` are the other sizes of `conv2d`: `channels`, `stride` and `groups`.
        """
        padding = kernel // 2
        x = self.record(
            operators.conv2d(names[0], x, kernel=kernel, padding=padding, bias=False, **sizes)
        )
        return self.record(operators.batch_norm(names[1], x))

    def activate(self, name: str, x: Value, kind: str = "relu") -> Value:
        """Add an activation function."""
        return self.record(operators.activation(name, x, kind=kind))

    def drop(self, name: str, x: Value, *, rate: float) -> Value:
        """Add the two nodes of dropout, or none where nothing is dropped."""
        given: object = rate
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1:
            raise InputError(f"dropout: expected a number from 0 to below 1, got {rate!r}")
        if rate == 0:
            return x
        mask = self.record(operators.dropout_mask(f"{name}.mask", x))
        return self.record(operators.dropout(name, x, mask))

    def classify(self, name: str, x: Value, *, classes: int) -> Graph:
        """Add the last linear layer, the labels and the loss, and return the training graph."""
        logits = self.record(operators.linear(name, x, features=classes))
        labels = self.indices("labels", *logits.shape[:-1])
        return self.differentiate(operators.cross_entropy("loss", logits, labels))

    def differentiate(self, loss: Declaration) -> Graph:
        """Record the loss, add the backward pass in reverse order, and return the graph.

        With an optimizer it ends in the update.
        """
        if loss.phase is not Phase.LOSS:
            raise InputError(f"{loss.name}: expected a loss, got phase {loss.phase.value!r}")
        self.record(loss)
        updated = self._optimizer is not None
        backward = BackwardPass(self._recorded, fused=self._fused, updated=updated)
        nodes = [*self._nodes, *backward.nodes]
        parameters = sum(weight.size for weight in self._weights.values())
        state_bytes = 0
        if self._optimizer is not None:
            state_bytes = OPTIMIZERS[self._optimizer].state_bytes * parameters
            read, item_bytes = backward.weight_gradients, self.item_bytes
            nodes.append(
                update_node(self._optimizer, read, parameters=parameters, item_bytes=item_bytes)
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
        raise InputError(f"{setting}: expected one of {', '.join(accepted)}, got {value!r}")


class BackwardPass:
    """Gradient nodes of the operators of a forward pass, one per gradient, or `fused`.

    Where an update reads the weight gradients (`updated`), each has a tensor to wait for.

    A weight gradient is written to the resident buffer, so its node outputs 0 bytes and computing
    it twice does no harm. The gradients of a weight that several operators share are added there;
    twice would be wrong, and such nodes are not recomputable.

    A gradient that arrives from several users is summed by one node once all of them are there.
    """

    def __init__(self, recorded: Sequence[Declaration], *, fused: bool, updated: bool) -> None:
        self.nodes: list[Node] = []
        self.weight_gradients: list[str] = []
        """The 0-byte tensors that stand for weight gradients."""
        self._fused = fused
        self._updated = updated
        self._contributions: dict[str, list[Value]] = {}
        self._uses = Counter(weight.name for use in recorded for weight in use.weights)
        for declaration in reversed(recorded):
            self._differentiate(declaration)

    def _differentiate(self, declaration: Declaration) -> None:
        """Add the nodes of one operator, unless no gradient arrives at its result."""
        gradient = self._arriving(declaration.outputs[0])
        if gradient is not None:
            for value in declaration.passes:
                self._contribute(value, gradient)
        elif declaration.phase is not Phase.LOSS:
            return
        wanted = tuple(
            part for part in declaration.gradients if part.of is None or part.of.differentiable
        )
        for parts in [wanted] if self._fused and wanted else [(part,) for part in wanted]:
            self._add(declaration, parts, gradient)

    def _add(
        self, declaration: Declaration, parts: tuple[Gradient, ...], gradient: Value | None
    ) -> None:
        """Add one backward node."""
        ending = "" if self._fused else f"_{parts[0].part}"
        name = declaration.name + (".backward" if self._fused else f".grad{ending}")
        read = {value.name: value for part in parts for value in part.saved}
        if gradient is not None:
            read = {gradient.name: gradient} | read
        outputs = self._outputs(declaration, parts, name)
        writes_weights = any(part.of is None for part in parts)
        shares = any(self._uses[weight.name] > 1 for weight in declaration.weights)
        self.nodes.append(
            Node(
                name=name,
                op=f"{declaration.op}_backward{ending}",
                phase=Phase.BACKWARD,
                inputs=tuple(read),
                outputs=outputs,
                workspace_bytes=max(part.workspace_bytes for part in parts),
                flops=sum(part.flops for part in parts)
                - (declaration.shared_flops if len(parts) > 1 else 0),
                recomputable=not (writes_weights and shares),
                bytes_moved=sum(value.bytes for value in read.values())
                + sum(tensor.bytes for tensor in outputs)
                + sum(part.weight_bytes_moved for part in parts),
            )
        )

    def _outputs(
        self, declaration: Declaration, parts: tuple[Gradient, ...], node: str
    ) -> tuple[Tensor, ...]:
        """Make the tensors of a backward node and note whose gradients they are."""
        made = [part for part in parts if part.of is not None or self._updated or len(parts) == 1]
        outputs = []
        for part in made:
            name = node if len(made) == 1 else f"{declaration.name}.grad_{part.part}"
            if part.of is None:
                outputs.append(Tensor(name=name, bytes=0))
                self.weight_gradients.append(name)
            else:
                outputs.append(Tensor(name=name, bytes=part.of.bytes))
                self._contribute(part.of, replace(part.of, name=name))
        return tuple(outputs)

    def _contribute(self, value: Value, gradient: Value) -> None:
        if value.differentiable:
            self._contributions.setdefault(value.name, []).append(gradient)

    def _arriving(self, result: Value) -> Value | None:
        """Return the gradient of an operator's result, summed if it comes from several users."""
        parts = self._contributions.get(result.name, [])
        if len(parts) <= 1:
            return parts[0] if parts else None
        total = replace(result, name=f"{result.name}.grad")
        self.nodes.append(
            Node(
                name=total.name,
                op="add",
                phase=Phase.BACKWARD,
                inputs=tuple(part.name for part in parts),
                outputs=(Tensor(name=total.name, bytes=total.bytes),),
                flops=(len(parts) - 1) * total.size,
                bytes_moved=(len(parts) + 1) * total.bytes,
            )
        )
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """An optimizer, per parameter."""

    flops: int
    """Work [FLOP]."""
    state_bytes: int
    """State that stays from step to step, in single precision [B]."""


OPTIMIZERS: Final[Mapping[str, UpdateRule]] = {
    # Scale the gradient and subtract it.
    "sgd": UpdateRule(flops=2, state_bytes=0),
    # Both moments 3 and 4; root, add epsilon, divide, scale, subtract 5.
    "adam": UpdateRule(flops=12, state_bytes=2 * FLOAT_BYTES),
}


def update_node(
    optimizer: str, weight_gradients: Sequence[str], *, parameters: int, item_bytes: int
) -> Node:
    """Return the node that updates all weights at the end of the step.

    It reads the 0-byte tensors that say that the gradient of a layer's weights is in its buffer,
    and its output is 0 bytes: weights and state are resident. It is the last node and not
    recomputable, so no operator can be recomputed with weights that are new already, and none is
    updated twice. One node per layer would allow both.
    """
    rule = OPTIMIZERS[optimizer]
    return Node(
        name="update",
        op=f"{optimizer}_update",
        phase=Phase.UPDATE,
        inputs=tuple(weight_gradients),
        outputs=(Tensor(name="update", bytes=0),),
        flops=rule.flops * parameters,
        recomputable=False,
        bytes_moved=(3 * item_bytes + 2 * rule.state_bytes) * parameters,
    )
