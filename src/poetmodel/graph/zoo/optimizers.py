"""Update rules: what one optimizer step costs."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.graph.structure import Node, Phase, Tensor
from poetmodel.graph.zoo.values import FLOAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """An optimizer, per parameter."""

    flops: int
    """Work [FLOP]."""
    state_bytes: int
    """State that stays from step to step, in single precision [B]."""


OPTIMIZERS: Final[Mapping[str, UpdateRule]] = MappingProxyType(
    {
        # Scale the gradient and subtract it.
        "sgd": UpdateRule(flops=2, state_bytes=0),
        # Both moments 3 and 4; root, add epsilon, divide, scale, subtract 5.
        "adam": UpdateRule(flops=12, state_bytes=2 * FLOAT_BYTES),
    }
)
"""The update rules by name."""


def update_node(
    optimizer: str, weight_gradients: Sequence[str], *, parameters: int, item_bytes: int
) -> Node:
    """Return the node that updates all weights at the end of the step.

    Parameters
    ----------
    optimizer : str
        A key of `OPTIMIZERS`.
    weight_gradients : sequence of str
        The 0-byte tensors that say that the gradient of a layer's weights is in its buffer.
    parameters : int
        Number of trainable parameters.
    item_bytes : int
        Size of a parameter [B].

    Returns
    -------
    Node
        Its output is 0 bytes: weights and state are resident.

    Notes
    -----
    It is the last node and not recomputable, so no operator can be recomputed with weights that
    are new already, and none is updated twice. One node per layer would allow both.
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
