"""The backward pass: from recorded operators to gradient nodes, last operator first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from poetmodel.graph.structure import Node, Phase, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph.zoo.declaration import Declaration, Gradient
    from poetmodel.graph.zoo.values import Value


class BackwardPass:
    """Gradient nodes of recorded operators.

    Parameters
    ----------
    recorded : sequence of Declaration
        The forward pass in execution order; the loss is the one of phase ``loss``.
    fused : bool
        One node per operator in place of one per gradient.
    updated : bool
        Whether an update reads the weight gradients, so that each needs a tensor to wait for.

    Notes
    -----
    A weight gradient is written to the resident buffer, so its node outputs 0 bytes and computing
    it twice does no harm. The gradients of a weight that several operators share are added there;
    twice would be wrong, and such nodes are not recomputable.

    A gradient that arrives from several users is summed by one node once all of them are there.
    """

    def __init__(self, recorded: Sequence[Declaration], *, fused: bool, updated: bool) -> None:
        self.nodes: list[Node] = []
        """The nodes, in execution order."""
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
        for parts in self._groups(declaration):
            self._add(declaration, parts, gradient)

    def _groups(self, declaration: Declaration) -> Iterator[tuple[Gradient, ...]]:
        """Yield the wanted parts of an operator's backward, one group per node."""
        wanted = tuple(
            part for part in declaration.gradients if part.of is None or part.of.differentiable
        )
        if not self._fused:
            yield from ((part,) for part in wanted)
        elif wanted:
            yield wanted

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
                recomputable=not (writes_weights and self._shares(declaration)),
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

    def _shares(self, declaration: Declaration) -> bool:
        return any(self._uses[weight.name] > 1 for weight in declaration.weights)

    def _contribute(self, value: Value, gradient: Value) -> None:
        if value.differentiable:
            self._contributions.setdefault(value.name, []).append(gradient)

    def _arriving(self, result: Value) -> Value | None:
        """Return the gradient of an operator's result, summed if it comes from several users."""
        parts = self._contributions.get(result.name, [])
        if len(parts) < 2:  # noqa: PLR2004
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
