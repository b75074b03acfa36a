"""The tape: records a forward pass operator by operator and makes the training graph of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypedDict

from poetmodel.errors import InputError
from poetmodel.graph.structure import Graph, Node, Phase, Tensor
from poetmodel.graph.zoo import operators
from poetmodel.graph.zoo.backward import BackwardPass
from poetmodel.graph.zoo.declaration import INDEX_BYTES, ITEM_BYTES, Value, require_counts
from poetmodel.graph.zoo.norms import batch_norm
from poetmodel.graph.zoo.state import StateOptions, StateTensors
from poetmodel.graph.zoo.updates import OPTIMIZERS, update_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph.zoo.declaration import Declaration, Weight


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
    state: Literal["sgd", "momentum", "adam", "frozen"] | None
    """Put weights and the state of this optimizer into the graph; None leaves them outside."""
    in_place: bool
    """Mark the operators that may write over an input."""
    tile: str | int | None
    """Split larger weights into state tensors of at most this size, along output channels."""
    train: str | None
    """What is trained: ``"all"``, ``"last-N"``, ``"biases"``, or a pattern of names."""


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
        state: str | None = None,
        in_place: bool = False,
        tile: str | int | None = None,
        train: str | None = None,
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
        self._in_place = in_place
        self._state = StateOptions.of(state, train=train, tile=tile, optimizer=optimizer)
        self._recorded: list[Declaration] = []
        self._inputs: list[tuple[int, Node]] = []
        self._weights: dict[str, Weight] = {}

    def indices(self, name: str, *shape: int) -> Value:
        """Add a node that brings labels or token ids; as `input`."""
        return self.input(name, *shape, item_bytes=INDEX_BYTES)

    def input(self, name: str, *shape: int, item_bytes: int | None = None) -> Value:
        """Add a node that brings samples, of the tape's element type by default.

        It is not recomputable: a sample comes once. To have it again, keep it or page it.
        """
        value = Value(name=name, shape=shape, item_bytes=item_bytes or self.item_bytes)
        node = Node(
            name=name,
            op="input",
            phase=Phase.INPUT,
            outputs=(Tensor(name=name, bytes=value.bytes),),
            recomputable=False,
            on_aux=self._on_aux,
        )
        self._inputs.append((len(self._recorded), node))
        return value

    def record(self, declaration: Declaration) -> Value:
        """Add the forward node of an operator and return its result."""
        for weight in declaration.weights:
            if self._weights.setdefault(weight.name, weight) != weight:
                raise InputError(
                    f"{declaration.name}: the weight {weight.name!r} is shared in two shapes"
                )
        self._recorded.append(declaration)
        return declaration.outputs[0]

    # -- groups of operators that several models share ----------------------------------------

    def image(self, image_size: int, *, channels: int = 3) -> Value:
        """Add a batch of square images."""
        return self.input("input", self.batch_size, channels, image_size, image_size)

    def conv_bn(
        self, x: Value, names: tuple[str, str], *, kernel: int, bias: bool = False, **sizes: int
    ) -> Value:
        """Add a convolution that keeps the size (over the stride), and its batch norm.

        `sizes` are the other sizes of `conv2d`: `channels`, `stride` and `groups`.
        """
        padding = kernel // 2
        x = self.record(
            operators.conv2d(names[0], x, kernel=kernel, padding=padding, bias=bias, **sizes)
        )
        return self.record(batch_norm(names[1], x))

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
        nodes = (
            self._with_resident_weights() if self._state is None else self._with_state(self._state)
        )
        if not self._in_place:
            nodes = [replace(node, in_place=()) if node.in_place else node for node in nodes]
        return Graph(
            name=self.name,
            nodes=tuple(nodes),
            batch_size=self.batch_size,
            dtype=self.dtype,
            resident_bytes=self._resident_bytes(),
            parameters=self._parameters,
            forward_macs=sum(declaration.macs for declaration in self._recorded),
        )

    @property
    def _parameters(self) -> int:
        return sum(weight.size for weight in self._weights.values())

    def _resident_bytes(self) -> dict[str, int]:
        """Return what lies in RAM outside of the graph; nothing where state is inside."""
        if self._state is not None:
            return {}
        rule = None if self._optimizer is None else OPTIMIZERS[self._optimizer]
        return {
            "parameters": self._parameters * self.item_bytes,
            "gradients": self._parameters * self.item_bytes,
            "optimizer": 0 if rule is None else rule.state_bytes * self._parameters,
        }

    def _with_resident_weights(self) -> list[Node]:
        """Return the nodes of a step whose weights, gradients and moments are no tensors."""
        recorded = [replace(each, parts=each.gradients) for each in self._recorded]
        updated = self._optimizer is not None
        backward = BackwardPass(recorded, fused=self._fused, updated=updated)
        nodes = [*self._forward(recorded, None), *backward.nodes]
        if self._optimizer is not None:
            update = update_node(
                self._optimizer,
                backward.weight_gradients,
                parameters=self._parameters,
                item_bytes=self.item_bytes,
            )
            nodes.append(update)
        return nodes

    def _with_state(self, options: StateOptions) -> list[Node]:
        """Return the nodes of a step with every parameter and moment as a state tensor."""
        recorded = options.prepared(self._recorded)
        state = StateTensors(options.rule)
        forward = list(self._forward(recorded, state))
        return [*forward, *BackwardPass(recorded, fused=self._fused, state=state).nodes]

    def _forward(
        self, recorded: Sequence[Declaration], state: StateTensors | None
    ) -> Iterator[Node]:
        """Yield the forward nodes and, before their first readers, samples and state."""
        inputs = list(self._inputs)
        for position, declaration in enumerate(recorded):
            while inputs and inputs[0][0] <= position:
                yield inputs.pop(0)[1]
            if state is None:
                yield _forward_node(declaration, ())
                continue
            yield from state.hold(*declaration.weights)
            yield _forward_node(declaration, declaration.weights)
            yield from state.renew(declaration)
        yield from (node for _, node in inputs)


def _forward_node(declaration: Declaration, state: Sequence[Weight]) -> Node:
    read = {value.name: value.bytes for value in declaration.inputs}
    weight_bytes_moved = declaration.weight_bytes_moved
    if weight_bytes_moved is None:
        weight_bytes_moved = sum(weight.bytes for weight in declaration.weights)
    over = declaration.in_place
    return Node(
        name=declaration.name,
        op=declaration.op,
        phase=declaration.phase,
        inputs=(*read, *(weight.name for weight in state)),
        outputs=tuple(Tensor(name=made.name, bytes=made.bytes) for made in declaration.outputs),
        workspace_bytes=declaration.workspace_bytes,
        flops=declaration.flops,
        recomputable=declaration.recomputable,
        bytes_moved=sum(read.values())
        + sum(made.bytes for made in declaration.outputs)
        + weight_bytes_moved,
        in_place=() if over is None else ((over.name, declaration.inputs[0].name),),
    )


def _require_known(setting: str, value: str, accepted: Mapping[str, object]) -> None:
    if value not in accepted:
        raise InputError(f"{setting}: expected one of {', '.join(accepted)}, got {value!r}")
