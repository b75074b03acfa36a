"""The optimizers, and their update at the end of a step where weights are outside of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.graph.structure import Node, Phase, Tensor
from poetmodel.graph.zoo.declaration import FLOAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """An optimizer, per parameter."""

    name: str
    flops: int
    """Work [FLOP]."""
    moments: tuple[str, ...] = ()
    """What it keeps from step to step, each a number in single precision."""

    @property
    def state_bytes(self) -> int:
        """State that stays from step to step [B]."""
        return FLOAT_BYTES * len(self.moments)

    def bytes_moved(self, item_bytes: int) -> int:
        """Return the traffic [B]: gradient and weight read, weight written, moments both.

        `item_bytes` is the size of a weight and of its gradient.
        """
        return 3 * item_bytes + 2 * self.state_bytes


RULES: Final[Mapping[str, UpdateRule]] = {
    rule.name: rule
    for rule in (
        # Scale the gradient and subtract it.
        UpdateRule(name="sgd", flops=2),
        # Scale the momentum and add the gradient, then as above.
        UpdateRule(name="momentum", flops=4, moments=("momentum",)),
        # Both moments 3 and 4; root, add epsilon, divide, scale, subtract 5.
        UpdateRule(name="adam", flops=12, moments=("first_moment", "second_moment")),
    )
}

OPTIMIZERS: Final = {name: RULES[name] for name in ("sgd", "adam")}
"""Those that a graph without state can end in."""


def update_node(
    optimizer: str, weight_gradients: Sequence[str], *, parameters: int, item_bytes: int
) -> Node:
    """Return the node that updates all weights at the end of the step.

    It reads the 0-byte tensors that say that the gradient of a layer's weights is in its buffer,
    and its output is 0 bytes: weights and state are resident. It is the last node and not
    recomputable, so no operator can be recomputed with weights that are new already, and none is
    updated twice. One node per layer needs weights that are tensors: see `StateTensors`.
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
        bytes_moved=rule.bytes_moved(item_bytes) * parameters,
    )
