"""State in the graph: which weights are trained, in which tiles, and the nodes that hold and renew.

Every weight, every moment of the optimizer and every running statistic is a state tensor, placed
before its first reader. What replaces it is made by a node of its own, which cannot be computed
again; all other nodes can, until what they read has been replaced. Where weights are outside of the
graph, one node at the end of the step is the optimizer's update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from poetmodel.budgets import TileChoice
from poetmodel.errors import InputError
from poetmodel.graph.node import Node, Phase, Tensor
from poetmodel.graph.zoo.declaration import FLOAT_BYTES, Declaration, Gradient, Value, Weight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """An optimizer, per parameter."""

    name: str
    flops: int
    """Work [FLOP]."""
    moments: tuple[str, ...] = ()
    """Tensors kept from step to step, each a number in single precision."""

    @property
    def state_bytes(self) -> int:
        """State that stays from step to step [B]."""
        return FLOAT_BYTES * len(self.moments)

    def bytes_moved(self, item_bytes: int) -> int:
        """Return the traffic [B]: gradient and weight read, weight written, moments both.

        `item_bytes` is the size of a weight and of its gradient.
        """
        return 3 * item_bytes + 2 * self.state_bytes


UPDATE_RULES: Final[Mapping[str, UpdateRule]] = {
    rule.name: rule
    for rule in (
        # Scale the gradient and subtract it.
        UpdateRule(name="sgd", flops=2),
        # Scale the momentum and add the gradient, then as above.
        UpdateRule(name="momentum", flops=4, moments=("momentum",)),
        # Both moments 3 and 4; root, add epsilon, divide, scale, subtract 5.
        UpdateRule(name="adam", flops=12, moments=("first_moment", "second_moment")),
        # The first moment 3; scale the largest gradient, absolute value, add epsilon, compare 4;
        # divide, scale, subtract 3.
        UpdateRule(name="adamax", flops=10, moments=("first_moment", "infinity_norm")),
        # As Adam, and the length of the average scales the step.
        UpdateRule(name="radam", flops=12, moments=("first_moment", "second_moment")),
    )
}

OPTIMIZERS: Final = {name: UPDATE_RULES[name] for name in ("sgd", "adam")}
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


FROZEN: Final = "frozen"
"""The state of a step that trains nothing."""
STATES: Final = (*UPDATE_RULES, FROZEN)
"""Kinds of state in a step: that of an optimizer, or weights that are only read."""

ALL: Final = "all"
"""Trained parts by default."""
_PATTERNS: Final = {ALL: "*", "biases": "*.bias"}
"""The patterns of parameters that have a name."""

# Per channel: square and invert the deviation, subtract epsilon, unbias 4; blend both 6.
_RENEWAL_FLOPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """State of a step, its trained part, and its pieces."""

    rule: UpdateRule | None
    """The optimizer; None where nothing is trained."""
    train: str = ALL
    """``all``, ``last-N``, ``biases``, or a pattern of names of weights or layers."""
    tile_bytes: int | None = None
    """Largest piece of a weight [B]; None for whole weights."""

    @classmethod
    def of(
        cls, state: str | None, *, train: str | None, tile: str | int | None, optimizer: str | None
    ) -> StateOptions | None:
        """Read the options of a model; None where it has no state in the graph."""
        if state is None:
            for name, given in (("train", train), ("tile", tile)):
                if given is not None:
                    raise InputError(
                        f"{name}: {given!r} is for a step with state in its graph; give state too, "
                        f"one of {', '.join(STATES)}"
                    )
            return None
        if state not in STATES:
            raise InputError(f"state: expected one of {', '.join(STATES)}, got {state!r}")
        if optimizer is not None:
            raise InputError(
                f"optimizer: {optimizer!r} ends a step whose weights are outside of its graph; "
                f"with state {state!r} leave it out"
            )
        if state == FROZEN and train is not None:
            raise InputError(
                f"train: {train!r} trains, and state {FROZEN!r} does not; leave it out"
            )
        if train is not None and (not train or str(train) != train):
            raise InputError(
                "train: expected all, biases, last-N, or a pattern of parameters or layers such as "
                f"'fc3*', got {train!r}"
            )
        tile_bytes = TileChoice.parse(tile).require_size()
        return cls(rule=UPDATE_RULES.get(state), train=train or ALL, tile_bytes=tile_bytes)

    def prepared(self, recorded: Sequence[Declaration]) -> list[Declaration]:
        """Return operators as they are with this state: trained in part, and in tiles."""
        trained = self._trained(recorded)
        return [self._in_tiles(_trained_part(operation, trained)) for operation in recorded]

    def _trained(self, recorded: Sequence[Declaration]) -> frozenset[str]:
        """Return the names of the weights that are trained."""
        layers = [operation for operation in recorded if operation.weights]
        if self.rule is None:
            return frozenset()
        start, _, count = self.train.partition("-")
        if start == "last" and count.isdecimal():
            # A norm belongs to the layer before it.
            counted = [k for k, layer in enumerate(layers) if not layer.joint]
            if not 1 <= int(count) <= len(counted):
                raise InputError(
                    f"train: expected last-1 to last-{len(counted)}, got {self.train!r}"
                )
            layers = layers[counted[-int(count)] :]
            return frozenset(weight.name for layer in layers for weight in layer.weights)
        pattern = _PATTERNS.get(self.train, self.train)
        names = frozenset(
            weight.name
            for layer in layers
            for weight in layer.weights
            if fnmatchcase(weight.name, pattern)
            or fnmatchcase(weight.name.rpartition(".")[0], pattern)
        )
        if not names:
            raise InputError(
                f"train: expected all, biases, last-N, or a pattern of parameters or layers such "
                f"as '{layers[-1].name}*', got {self.train!r}, which matches nothing"
            )
        return names

    def _in_tiles(self, declaration: Declaration) -> Declaration:
        """Split weights, what reads them, and their gradients."""
        if self.tile_bytes is None:
            return declaration
        return replace(
            declaration,
            weights=tuple(tile for weight in declaration.weights for tile in self._tiles(weight)),
            parts=tuple(tile for part in declaration.parts for tile in self._tiles_of(part)),
        )

    def _tiles(self, weight: Weight) -> tuple[Weight, ...]:
        return (weight,) if self.tile_bytes is None else weight.tiles(self.tile_bytes)

    def _tiles_of(self, part: Gradient) -> list[Gradient]:
        reads = tuple(tile for weight in part.reads for tile in self._tiles(weight))
        if not isinstance(part.of, Weight):
            return [replace(part, reads=reads)]
        tiles = self._tiles(part.of)
        if len(tiles) == 1:
            return [replace(part, reads=reads)]
        flops = _shares(part.flops, tiles)
        added = _shares(part.added_bytes_moved or 0, tiles)
        return [
            replace(
                part,
                part=f"{part.part}.{number}",
                of=tile,
                reads=reads,
                flops=flops[number],
                added_bytes_moved=None if part.added_bytes_moved is None else added[number],
            )
            for number, tile in enumerate(tiles)
        ]


def _shares(whole: int, tiles: Sequence[Weight]) -> list[int]:
    """Return the shares of tiles in an amount, by their channels; their sum is the amount."""
    ends = list(accumulate((tile.shape[0] for tile in tiles), initial=0))
    return [whole * end // ends[-1] - whole * first // ends[-1] for first, end in pairwise(ends)]


def _trained_part(declaration: Declaration, trained: frozenset[str]) -> Declaration:
    """Return an operator without the gradients of weights that are not trained.

    Gradients of inputs come first: they read weights that the update would replace.
    """
    if declaration.evaluated is not None and declaration.weights[0].name not in trained:
        declaration = declaration.evaluated
    of_values = [part for part in declaration.parts if isinstance(part.of, Value)]
    of_weights = [
        part
        for part in declaration.parts
        if isinstance(part.of, Weight) and part.of.name in trained
    ]
    return replace(declaration, parts=(*of_values, *of_weights))


class StateTensors:
    """Make the nodes that hold state tensors and that replace them."""

    def __init__(self, rule: UpdateRule | None) -> None:
        self._rule = rule
        self._held: set[str] = set()

    def hold(self, *weights: Weight, op: str = "parameter") -> list[Node]:
        """Return the nodes of those state tensors that have none yet."""
        new = [weight for weight in weights if weight.name not in self._held]
        self._held.update(weight.name for weight in new)
        return [
            Node(
                name=weight.name,
                op=op if weight.trainable else "running_statistic",
                phase=Phase.STATE,
                outputs=(Tensor(name=weight.name, bytes=weight.bytes),),
            )
            for weight in new
        ]

    def update(self, name: str, gradients: Sequence[tuple[Weight, str]]) -> list[Node]:
        """Return the update of weights whose gradients have these names, after its moments."""
        rule = self._rule
        if rule is None:
            return []
        moments = [
            replace(weight, name=f"{weight.name}.{moment}", item_bytes=FLOAT_BYTES)
            for weight, _ in gradients
            for moment in rule.moments
        ]
        state = [*(weight for weight, _ in gradients), *moments]
        size = sum(weight.size for weight, _ in gradients)
        update = Node(
            name=name,
            op=f"{rule.name}_update",
            phase=Phase.UPDATE,
            inputs=(*(gradient for _, gradient in gradients), *(tensor.name for tensor in state)),
            outputs=tuple(map(_replacement, state)),
            flops=rule.flops * size,
            recomputable=False,
            bytes_moved=rule.bytes_moved(gradients[0][0].item_bytes) * size,
        )
        return [*self.hold(*moments, op="moment"), update]

    def renew(self, declaration: Declaration) -> list[Node]:
        """Return the nodes that renew the running statistics of an operator, if it has any."""
        running = declaration.running
        if not running:
            return []
        read = (*declaration.outputs[1:], *running)
        renewal = Node(
            name=f"{declaration.name}.running",
            op="running_statistics",
            phase=Phase.UPDATE,
            inputs=tuple(tensor.name for tensor in read),
            outputs=tuple(map(_replacement, running)),
            flops=_RENEWAL_FLOPS * running[0].size,
            recomputable=False,
        )
        return [*self.hold(*running), renewal]


def _replacement(weight: Weight) -> Tensor:
    return Tensor(name=f"{weight.name}+", bytes=weight.bytes, replaces=weight.name)
