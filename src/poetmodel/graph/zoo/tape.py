"""The tape: records a forward pass operator by operator and makes the training graph of it.

The backward pass is reverse-mode differentiation of the operators in the order in which they ran.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypedDict

from poetmodel.errors import InputError
from poetmodel.graph.node import Node, Phase, Tensor
from poetmodel.graph.structure import Graph
from poetmodel.graph.zoo import operators
from poetmodel.graph.zoo.declaration import (
    INDEX_BYTES,
    ITEM_BYTES,
    Array,
    Declaration,
    Gradient,
    Value,
    Weight,
    require_counts,
)
from poetmodel.graph.zoo.masks import differentiable, masked
from poetmodel.graph.zoo.operators import batch_norm
from poetmodel.graph.zoo.state import ALL, OPTIMIZERS, StateOptions, StateTensors, update_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


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
    state: str | None
    """Put weights and the state of one of `STATES` into the graph; None leaves them outside."""
    in_place: bool
    """Mark the operators that may write over an input."""
    tile: str | int | None
    """Split larger weights into state tensors of at most this size, along output channels."""
    train: str | None
    """Trained parts: ``"all"``, ``"last-N"``, ``"biases"``, or a pattern of names."""


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
        """Return the bytes in RAM outside of the graph; nothing if state is inside."""
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
        recorded = [replace(operation, parts=operation.gradients) for operation in self._recorded]
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
        if options.rule is not None and options.train != ALL:
            recorded = masked(recorded)
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
        outputs=tuple(
            Tensor(name=tensor.name, bytes=tensor.bytes) for tensor in declaration.outputs
        ),
        workspace_bytes=declaration.workspace_bytes,
        flops=declaration.flops,
        recomputable=declaration.recomputable,
        bytes_moved=sum(read.values())
        + sum(tensor.bytes for tensor in declaration.outputs)
        + weight_bytes_moved,
        in_place=() if over is None else ((over.name, declaration.inputs[0].name),),
    )


def _require_known(setting: str, value: str, accepted: Mapping[str, object]) -> None:
    if value not in accepted:
        raise InputError(f"{setting}: expected one of {', '.join(accepted)}, got {value!r}")


class BackwardPass:
    """Gradient nodes of the operators of a forward pass, one per gradient, or `fused`.

    Without state in the graph, a weight gradient is written to the resident buffer, so its node
    outputs 0 bytes and computing it twice does no harm. Where an update reads the weight gradients
    (`updated`), each has a tensor to wait for. The gradients of a weight that several operators
    share are added there; twice would be wrong, and such nodes are not recomputable.

    With `state` a weight gradient is a tensor with its bytes, and the update of a weight follows
    directly after the last gradient of it. The input gradient comes before, since it reads the
    weight.

    A gradient that arrives from several users, or of a weight that several operators share, is
    summed by one node once all of them are there.
    """

    def __init__(
        self,
        recorded: Sequence[Declaration],
        *,
        fused: bool,
        updated: bool = False,
        state: StateTensors | None = None,
    ) -> None:
        self.nodes: list[Node] = []
        self.weight_gradients: list[str] = []
        """The 0-byte tensors that stand for weight gradients."""
        self._fused = fused
        self._updated = updated
        self._state = state
        self._differentiable = differentiable(recorded)
        self._contributions: dict[str, list[Value]] = {}
        self._of_weights: dict[str, list[str]] = {}
        self._uses = Counter(weight.name for use in recorded for weight in use.weights)
        self._due = Counter(
            part.of.name for use in recorded for part in use.parts if isinstance(part.of, Weight)
        )
        for declaration in reversed(recorded):
            self._differentiate(declaration)

    def _differentiate(self, declaration: Declaration) -> None:
        """Add the nodes of one operator, unless no gradient arrives at its result."""
        gradient = self._arriving(declaration.outputs[0])
        if gradient is None and declaration.phase is not Phase.LOSS:
            self._update(declaration, declaration.parts)
            return
        if gradient is not None:
            for value in declaration.passes:
                self._contribute(value, gradient)
        wanted = tuple(
            part
            for part in declaration.parts
            if not isinstance(part.of, Value) or part.of.name in self._differentiable
        )
        together = self._fused or (declaration.joint and self._state is not None)
        for parts in [wanted] if together and wanted else [(part,) for part in wanted]:
            self._add(declaration, parts, gradient)
            self._update(declaration, parts)

    def _add(
        self, declaration: Declaration, parts: tuple[Gradient, ...], gradient: Value | None
    ) -> None:
        """Add one backward node."""
        together = self._fused or len(parts) > 1
        name = declaration.name + (".backward" if together else f".grad_{parts[0].part}")
        read = {value.name: value for part in parts for value in part.saved}
        if gradient is not None:
            read = {gradient.name: gradient} | read
        outputs = self._outputs(declaration, parts, name)
        kinds = {part.kind for part in parts}
        shares = any(self._uses[weight.name] > 1 for weight in declaration.weights)
        self.nodes.append(
            Node(
                name=name,
                op=f"{declaration.op}_backward" + ("" if together else f"_{parts[0].kind}"),
                phase=Phase.BACKWARD,
                inputs=(*read, *self._state_read(parts)),
                outputs=tuple(outputs.values()),
                workspace_bytes=max(part.workspace_bytes for part in parts),
                flops=sum(part.flops for part in parts)
                - sum(flops for part in parts for other, flops in part.spared if other in kinds),
                recomputable=not (shares and any(part.of is None for part in parts)),
                bytes_moved=sum(value.bytes for value in read.values())
                + sum(tensor.bytes for tensor in outputs.values())
                + sum(map(self._weight_bytes_moved, parts)),
                in_place=tuple(
                    (outputs[part.part].name, next(iter(read))) for part in parts if part.in_place
                ),
            )
        )

    def _state_read(self, parts: tuple[Gradient, ...]) -> tuple[str, ...]:
        """Return the state tensors that parts of a backward read."""
        if self._state is None:
            return ()
        return tuple(dict.fromkeys(weight.name for part in parts for weight in part.reads))

    def _weight_bytes_moved(self, part: Gradient) -> int:
        """Return the traffic of a part to weights and buffers that are no outputs [B]."""
        if self._state is None:
            return part.weight_bytes_moved
        return sum(weight.bytes for weight in part.reads) + (part.added_bytes_moved or 0)

    def _outputs(
        self, declaration: Declaration, parts: tuple[Gradient, ...], node: str
    ) -> dict[str, Tensor]:
        """Make the tensors of a backward node, by part, and note whose gradients they are."""
        gradients = [
            part for part in parts if part.of is not None or self._updated or len(parts) == 1
        ]
        outputs = {}
        for part in gradients:
            name = node if len(gradients) == 1 else f"{declaration.name}.grad_{part.part}"
            outputs[part.part] = Tensor(name=name, bytes=0 if part.of is None else part.of.bytes)
            if isinstance(part.of, Value):
                self._contribute(part.of, replace(part.of, name=name))
            elif part.of is None:
                self.weight_gradients.append(name)
            else:
                self._of_weights.setdefault(part.of.name, []).append(name)
        return outputs

    def _contribute(self, value: Value, gradient: Value) -> None:
        if value.name in self._differentiable:
            self._contributions.setdefault(value.name, []).append(gradient)

    def _arriving(self, result: Value) -> Value | None:
        """Return the gradient of an operator's result, summed if it comes from several users."""
        parts = self._contributions.get(result.name, [])
        if not parts:
            return None
        return replace(result, name=self._summed(result, [part.name for part in parts]))

    def _summed(self, of: Array, parts: Sequence[str]) -> str:
        """Return the gradient of a tensor, after adding the node that sums its parts if needed."""
        if len(parts) == 1:
            return parts[0]
        name = f"{of.name}.grad"
        self.nodes.append(
            Node(
                name=name,
                op="add",
                phase=Phase.BACKWARD,
                inputs=tuple(parts),
                outputs=(Tensor(name=name, bytes=of.bytes),),
                flops=(len(parts) - 1) * of.size,
                bytes_moved=(len(parts) + 1) * of.bytes,
                in_place=((name, parts[0]),),
            )
        )
        return name

    def _update(self, declaration: Declaration, parts: tuple[Gradient, ...]) -> None:
        """Add the update of those weights of whose gradients no other will come."""
        if self._state is None:
            return
        weights = [part.of for part in parts if isinstance(part.of, Weight)]
        self._due.subtract(weight.name for weight in weights)
        ready = [
            (weight, self._summed(weight, self._of_weights[weight.name]))
            for weight in weights
            if not self._due[weight.name] and weight.name in self._of_weights
        ]
        if ready:
            name = ready[0][0].name if len(ready) == 1 else declaration.name
            self.nodes += self._state.update(f"{name}.update", ready)
