"""Reverse-mode differentiation: the backward pass of operators recorded in execution order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from poetmodel.graph.structure import Node, Phase, Tensor
from poetmodel.graph.zoo.declaration import Value, Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.graph.zoo.declaration import Array, Declaration, Gradient
    from poetmodel.graph.zoo.state import StateTensors


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
        self._differentiable = _differentiable(recorded)
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
        made = {part.kind for part in parts}
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
                - sum(flops for part in parts for other, flops in part.spared if other in made),
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
        made = [part for part in parts if part.of is not None or self._updated or len(parts) == 1]
        outputs = {}
        for part in made:
            name = node if len(made) == 1 else f"{declaration.name}.grad_{part.part}"
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


def _differentiable(recorded: Sequence[Declaration]) -> frozenset[str]:
    """Return the tensors whose gradients are wanted: all that is computed with trained weights."""
    found: set[str] = set()
    for use in recorded:
        trained = any(not isinstance(part.of, Value) for part in use.parts)
        if trained or any(value.name in found for value in use.inputs):
            found.add(use.outputs[0].name)
    return frozenset(found)
