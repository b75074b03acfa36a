"""The tape: records a forward pass operator by operator and builds its training graph.

The backward pass is reverse-mode differentiation: it visits the operators in reverse order.
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
    require_rate,
)
from poetmodel.graph.zoo.masks import needed_gradients, save_bit_masks, values_with_gradient
from poetmodel.graph.zoo.operators import batch_norm
from poetmodel.graph.zoo.state import (
    ALL,
    OPTIMIZERS,
    StateNodeBuilder,
    StateOptions,
    make_update_node,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class TapeOptions(TypedDict, total=False):
    """Keyword arguments that every function of the zoo accepts in addition to its own."""

    batch_size: int
    """Samples per training step; 1 by default."""
    dtype: Literal["float32", "float16", "int8"]
    """Element type of activations, parameters and gradients; ``"float32"`` by default."""
    fused_backward: bool
    """One backward node per operator, as in POET, instead of one per gradient (the default)."""
    optimizer: Literal["sgd", "adam"] | None
    """Append an update node of this optimizer to a graph without `state`; None (the default)
    appends none."""
    input_on_aux: bool
    """Whether samples and labels are on auxiliary storage when the step begins; by default not."""
    state: str | None
    """One of `STATES`: adds weights and running statistics to the graph and, unless ``"frozen"``,
    moments and updates of this optimizer. None (the default) adds none of these."""
    in_place: bool
    """Mark operators that may overwrite an input, in `Node.in_place`; False by default."""
    tile: str | int | None
    """Maximum size of a tile, in bytes or with a unit, with `state` only. Larger weights are split
    along output channels; one channel may exceed the maximum. None (the default) splits none."""
    train: str | None
    """Weights to train, with `state` only: ``"all"`` (the default), ``"last-N"``, ``"biases"``, or
    a pattern of names of weights or layers."""


class Tape:
    """Records operators in execution order, then adds their backward pass.

    Its options are the keys of `TapeOptions`; an invalid value raises `InputError`. A `train`
    that selects no weight or an impossible number of layers raises it only in `differentiate`.

    Examples
    --------
    >>> from poetmodel.graph.zoo.operators import cross_entropy, linear
    >>> tape = Tape("tiny", batch_size=2)
    >>> y = tape.record(linear("fc", tape.add_input("input", 2, 8), features=3))
    >>> graph = tape.differentiate(cross_entropy("loss", y, tape.add_indices("labels", 2)))
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
        _require_option("dtype", dtype, ITEM_BYTES)
        if optimizer is not None:
            _require_option("optimizer", optimizer, OPTIMIZERS)
        self.name = name
        self.batch_size = batch_size
        self.dtype = dtype
        self.item_bytes = ITEM_BYTES[dtype]
        """Element size of activations, parameters and gradients [B]."""
        self._fused = fused_backward
        self._optimizer = optimizer
        self._on_aux = input_on_aux
        self._in_place = in_place
        self._state = StateOptions.parse(state, train=train, tile=tile, optimizer=optimizer)
        self._declarations: list[Declaration] = []
        # The number of operators recorded before each input node, and the node.
        self._inputs: list[tuple[int, Node]] = []
        self._weights: dict[str, Weight] = {}

    def add_indices(self, name: str, *shape: int) -> Value:
        """Add a node that provides labels or token ids and return its tensor; see `add_input`."""
        return self.add_input(name, *shape, item_bytes=INDEX_BYTES)

    def add_input(self, name: str, *shape: int, item_bytes: int | None = None) -> Value:
        """Add a node that provides samples and return its tensor; `shape` includes the batch.

        The node is not recomputable, since a sample is provided once.
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
        self._inputs.append((len(self._declarations), node))
        return value

    def record(self, declaration: Declaration) -> Value:
        """Append an operator to the forward pass; return its result. Equal names share a weight."""
        for weight in declaration.weights:
            if self._weights.setdefault(weight.name, weight) != weight:
                raise InputError(
                    f"{declaration.name}: an earlier weight {weight.name!r} differs in shape, "
                    "item_bytes or trainable"
                )
        self._declarations.append(declaration)
        return declaration.outputs[0]

    # -- groups of operators that several networks use ----------------------------------------

    def add_image(self, image_size: int, *, channels: int = 3) -> Value:
        """Add a node ``input`` that provides a batch of square images and return its tensor."""
        return self.add_input("input", self.batch_size, channels, image_size, image_size)

    def record_conv_bn(
        self, x: Value, names: tuple[str, str], *, kernel: int, bias: bool = False, **sizes: int
    ) -> Value:
        """Record convolution, with padding ``kernel // 2``, and batch norm; return the result."""
        padding = kernel // 2
        x = self.record(
            operators.conv2d(names[0], x, kernel=kernel, padding=padding, bias=bias, **sizes)
        )
        return self.record(batch_norm(names[1], x))

    def activate(self, name: str, x: Value, kind: str = "relu") -> Value:
        """Record an activation function and return its result."""
        return self.record(operators.activation(name, x, kind=kind))

    def record_dropout(self, name: str, x: Value, *, rate: float) -> Value:
        """Record the two operators of dropout and return the result; `x` itself for rate 0."""
        require_rate(rate)
        if rate == 0:
            return x
        mask = self.record(operators.dropout_mask(f"{name}.mask", x))
        return self.record(operators.dropout(name, x, mask))

    def classify(self, name: str, x: Value, *, classes: int) -> Graph:
        """Record a linear layer, ``labels`` and the cross entropy; return the training graph."""
        logits = self.record(operators.linear(name, x, features=classes))
        labels = self.add_indices("labels", *logits.shape[:-1])
        return self.differentiate(operators.cross_entropy("loss", logits, labels))

    def differentiate(self, loss: Declaration) -> Graph:
        """Record the loss, add backward pass and update, return the graph; to be called once."""
        if loss.phase is not Phase.LOSS:
            raise InputError(f"{loss.name}: expected a loss, got phase {loss.phase.value!r}")
        self.record(loss)
        nodes = (
            self._nodes_without_state()
            if self._state is None
            else self._nodes_with_state(self._state)
        )
        if not self._in_place:
            nodes = [replace(node, in_place=()) if node.in_place else node for node in nodes]
        return Graph(
            name=self.name,
            nodes=tuple(nodes),
            batch_size=self.batch_size,
            dtype=self.dtype,
            resident_bytes=self._resident_bytes(),
            parameters=self._n_parameters,
            forward_macs=sum(declaration.macs for declaration in self._declarations),
        )

    @property
    def _n_parameters(self) -> int:
        """Number of parameters; a shared weight counts once."""
        return sum(weight.size for weight in self._weights.values())

    def _resident_bytes(self) -> dict[str, int]:
        """Return the bytes of ``parameters``, ``gradients`` and ``optimizer``; {} with state."""
        if self._state is not None:
            return {}
        rule = None if self._optimizer is None else OPTIMIZERS[self._optimizer]
        return {
            "parameters": self._n_parameters * self.item_bytes,
            "gradients": self._n_parameters * self.item_bytes,
            "optimizer": 0 if rule is None else rule.state_bytes * self._n_parameters,
        }

    def _nodes_without_state(self) -> list[Node]:
        """Return the nodes of a step whose weights, gradients and moments are resident bytes."""
        declarations = [
            replace(declaration, parts=declaration.gradients) for declaration in self._declarations
        ]
        has_update = self._optimizer is not None
        backward = BackwardPass(declarations, fused=self._fused, has_update=has_update)
        nodes = [*self._forward_nodes(declarations, None), *backward.nodes]
        if self._optimizer is not None:
            update = make_update_node(
                self._optimizer,
                backward.weight_gradients,
                parameters=self._n_parameters,
                item_bytes=self.item_bytes,
            )
            nodes.append(update)
        return nodes

    def _nodes_with_state(self, options: StateOptions) -> list[Node]:
        """Return the nodes of a step in which parameters, moments and statistics are state.

        Unless `train` is ``all``, the backward pass reads bit masks where these suffice.
        """
        declarations = options.apply_to(self._declarations)
        if options.rule is not None and options.train != ALL:
            declarations = save_bit_masks(declarations)
        builder = StateNodeBuilder(options.rule)
        forward = list(self._forward_nodes(declarations, builder))
        return [*forward, *BackwardPass(declarations, fused=self._fused, builder=builder).nodes]

    def _forward_nodes(
        self, declarations: Sequence[Declaration], builder: StateNodeBuilder | None
    ) -> Iterator[Node]:
        """Yield the nodes of inputs, state and `declarations`, each before its first reader."""
        inputs = list(self._inputs)
        for position, declaration in enumerate(declarations):
            while inputs and inputs[0][0] <= position:
                yield inputs.pop(0)[1]
            if builder is None:
                yield _forward_node(declaration, ())
                continue
            yield from builder.make_missing_nodes(*declaration.weights)
            yield _forward_node(declaration, declaration.weights)
            yield from builder.make_statistics_nodes(declaration)
        yield from (node for _, node in inputs)


def _forward_node(declaration: Declaration, state_tensors: Sequence[Weight]) -> Node:
    """Return the forward node of an operator, which also reads `state_tensors`.

    Its traffic includes all weights, even if the graph contains no state.
    """
    input_bytes = {value.name: value.bytes for value in declaration.inputs}
    weight_bytes_moved = declaration.weight_bytes_moved
    if weight_bytes_moved is None:
        weight_bytes_moved = sum(weight.bytes for weight in declaration.weights)
    in_place_output = declaration.in_place
    return Node(
        name=declaration.name,
        op=declaration.op,
        phase=declaration.phase,
        inputs=(*input_bytes, *(weight.name for weight in state_tensors)),
        outputs=tuple(
            Tensor(name=tensor.name, bytes=tensor.bytes) for tensor in declaration.outputs
        ),
        workspace_bytes=declaration.workspace_bytes,
        flops=declaration.flops,
        recomputable=declaration.recomputable,
        bytes_moved=sum(input_bytes.values())
        + sum(tensor.bytes for tensor in declaration.outputs)
        + weight_bytes_moved,
        in_place=(
            () if in_place_output is None else ((in_place_output.name, declaration.inputs[0].name),)
        ),
    )


def _require_option(setting: str, value: str, options: Mapping[str, object]) -> None:
    if value not in options:
        raise InputError(f"{setting}: expected one of {', '.join(options)}, got {value!r}")


class BackwardPass:
    """Backward nodes of a forward pass: one per `Gradient`, or one per operator if `fused`.

    Without state, a weight gradient is a 0-byte output (its buffer is resident), recomputable
    unless operators share the weight. With state, it is a tensor, and the weight is updated as soon
    as it is complete; the input gradient comes first, since it reads the weight.
    """

    def __init__(
        self,
        declarations: Sequence[Declaration],
        *,
        fused: bool,
        has_update: bool = False,
        builder: StateNodeBuilder | None = None,
    ) -> None:
        self.nodes: list[Node] = []
        """The backward nodes, in execution order."""
        self.weight_gradients: list[str] = []
        """Names of the 0-byte tensors of nodes that write weight gradients to their buffers; empty
        with state in the graph."""
        self._fused = fused
        self._has_update = has_update
        self._builder = builder
        self._differentiable_names = values_with_gradient(declarations)
        self._gradients_of_value: dict[str, list[Value]] = {}
        self._gradients_of_weight: dict[str, list[str]] = {}
        self._n_uses = Counter(
            weight.name for declaration in declarations for weight in declaration.weights
        )
        """For each weight, the number of operators that read it."""
        self._pending_gradients = Counter(
            part.target.name
            for declaration in declarations
            for part in declaration.parts
            if isinstance(part.target, Weight)
        )
        """For each weight, the number of its gradients that are not done."""
        for declaration in reversed(declarations):
            self._add_backward(declaration)

    def _add_backward(self, declaration: Declaration) -> None:
        """Add the backward nodes of one operator, and updates whose last gradient they make.

        A node that sums several gradients of the result precedes them.
        """
        gradient = self._incoming_gradient(declaration.outputs[0])
        if gradient is None and declaration.phase is not Phase.LOSS:
            self._add_updates(declaration, declaration.parts)
            return
        if gradient is not None:
            for value in declaration.same_gradient_inputs:
                self._register_gradient(value, gradient)
        needed_parts = tuple(needed_gradients(declaration, self._differentiable_names))
        is_joint = self._fused or (declaration.is_one_kernel and self._builder is not None)
        for parts in (
            [needed_parts] if is_joint and needed_parts else [(part,) for part in needed_parts]
        ):
            self._add_node(declaration, parts, gradient)
            self._add_updates(declaration, parts)

    def _add_node(
        self, declaration: Declaration, parts: tuple[Gradient, ...], gradient: Value | None
    ) -> None:
        """Add one backward node that computes `parts`, and register the gradients that it makes.

        `gradient` is the incoming gradient; None for a loss.
        """
        is_joint = self._fused or len(parts) > 1
        name = declaration.name + (".backward" if is_joint else f".grad_{parts[0].suffix}")
        read_values = {value.name: value for part in parts for value in part.saved}
        if gradient is not None:
            read_values = {gradient.name: gradient} | read_values
        outputs = self._make_outputs(declaration, parts, name)
        kinds = {part.kind for part in parts}
        has_shared_weight = any(self._n_uses[weight.name] > 1 for weight in declaration.weights)
        self.nodes.append(
            Node(
                name=name,
                op=f"{declaration.op}_backward" + ("" if is_joint else f"_{parts[0].kind}"),
                phase=Phase.BACKWARD,
                inputs=(*read_values, *self._names_of_read_weights(parts)),
                outputs=tuple(outputs.values()),
                workspace_bytes=max(part.workspace_bytes for part in parts),
                flops=sum(part.flops for part in parts)
                - sum(
                    flops
                    for part in parts
                    for suffix, flops in part.shared_flops
                    if suffix in kinds
                ),
                recomputable=not (has_shared_weight and any(part.target is None for part in parts)),
                bytes_moved=sum(value.bytes for value in read_values.values())
                + sum(tensor.bytes for tensor in outputs.values())
                + sum(map(self._weight_bytes_moved, parts)),
                in_place=tuple(
                    (outputs[part.suffix].name, next(iter(read_values)))
                    for part in parts
                    if part.in_place
                ),
            )
        )

    def _names_of_read_weights(self, parts: tuple[Gradient, ...]) -> tuple[str, ...]:
        """Return the names of the weights that these parts read as tensors; () without state."""
        if self._builder is None:
            return ()
        return tuple(dict.fromkeys(weight.name for part in parts for weight in part.reads))

    def _weight_bytes_moved(self, part: Gradient) -> int:
        """Return the traffic of weights and of their gradient, unless it is an output [B]."""
        if self._builder is None:
            return part.weight_bytes_moved
        return sum(weight.bytes for weight in part.reads) + (part.accumulation_bytes_moved or 0)

    def _make_outputs(
        self, declaration: Declaration, parts: tuple[Gradient, ...], node_name: str
    ) -> dict[str, Tensor]:
        """Return the outputs of a backward node by suffix of the part; register gradients."""
        output_parts = [
            part for part in parts if part.target is not None or self._has_update or len(parts) == 1
        ]
        outputs = {}
        for part in output_parts:
            name = node_name if len(output_parts) == 1 else f"{declaration.name}.grad_{part.suffix}"
            outputs[part.suffix] = Tensor(
                name=name, bytes=0 if part.target is None else part.target.bytes
            )
            if isinstance(part.target, Value):
                self._register_gradient(part.target, replace(part.target, name=name))
            elif part.target is None:
                self.weight_gradients.append(name)
            else:
                self._gradients_of_weight.setdefault(part.target.name, []).append(name)
        return outputs

    def _register_gradient(self, value: Value, gradient: Value) -> None:
        """Register a contribution to the gradient of a value, if the value needs a gradient."""
        if value.name in self._differentiable_names:
            self._gradients_of_value.setdefault(value.name, []).append(gradient)

    def _incoming_gradient(self, result: Value) -> Value | None:
        """Return the gradient of an operator's result, summed by a node if necessary, or None."""
        gradients = self._gradients_of_value.get(result.name, [])
        if not gradients:
            return None
        return replace(result, name=self._sum_gradients(result, [part.name for part in gradients]))

    def _sum_gradients(self, target: Array, gradients: Sequence[str]) -> str:
        """Return the name of the sum of `gradients`, by a new node if there are several."""
        if len(gradients) == 1:
            return gradients[0]
        name = f"{target.name}.grad"
        self.nodes.append(
            Node(
                name=name,
                op="add",
                phase=Phase.BACKWARD,
                inputs=tuple(gradients),
                outputs=(Tensor(name=name, bytes=target.bytes),),
                flops=(len(gradients) - 1) * target.size,
                bytes_moved=(len(gradients) + 1) * target.bytes,
                in_place=((name, gradients[0]),),
            )
        )
        return name

    def _add_updates(self, declaration: Declaration, parts: tuple[Gradient, ...]) -> None:
        """Count weight gradients of `parts` as done; update weights that have all of theirs."""
        if self._builder is None:
            return
        weights = [part.target for part in parts if isinstance(part.target, Weight)]
        self._pending_gradients.subtract(weight.name for weight in weights)
        complete_gradients = [
            (weight, self._sum_gradients(weight, self._gradients_of_weight[weight.name]))
            for weight in weights
            if not self._pending_gradients[weight.name] and weight.name in self._gradients_of_weight
        ]
        if complete_gradients:
            name = (
                complete_gradients[0][0].name if len(complete_gradients) == 1 else declaration.name
            )
            self.nodes += self._builder.make_update_nodes(f"{name}.update", complete_gradients)
