"""State in the graph: trained weights, their tiles, and the nodes that hold and update state.

Every weight, every moment of the optimizer and every running statistic is a state tensor, whose
node precedes its first reader. Separate nodes make the replacements of trained weights, moments and
running statistics. These nodes, nodes of state, inputs and dropout masks are not recomputable. All
other nodes are recomputable until state that they read is replaced. In graphs without state, one
node at the end of the step is the optimizer's update, if an optimizer is chosen.
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
    """An optimizer's cost and state per parameter."""

    name: str
    """Name of the optimizer, a value of `TapeOptions.state`; see also `OPTIMIZERS`."""
    flops: int
    """Work per parameter [FLOP]."""
    moments: tuple[str, ...] = ()
    """Name suffixes of the moments of a weight. Each moment has one single-precision number per
    parameter."""

    @property
    def state_bytes(self) -> int:
        """Size of all moments per parameter [B]."""
        return FLOAT_BYTES * len(self.moments)

    def bytes_moved(self, item_bytes: int) -> int:
        """Return the traffic per parameter [B]: gradient read, weight and moments both ways."""
        return 3 * item_bytes + 2 * self.state_bytes


UPDATE_RULES: Final[Mapping[str, UpdateRule]] = {
    rule.name: rule
    for rule in (
        # The comments list the operations per parameter and their FLOP.
        # Scale the gradient and subtract it.
        UpdateRule(name="sgd", flops=2),
        # Scale the momentum, add the gradient, then as in sgd.
        UpdateRule(name="momentum", flops=4, moments=("momentum",)),
        # Both moments 3 and 4; root, add epsilon, divide, scale, subtract 5.
        UpdateRule(name="adam", flops=12, moments=("first_moment", "second_moment")),
        # The first moment 3; scale the largest gradient, absolute value, add epsilon, compare 4;
        # divide, scale, subtract 3.
        UpdateRule(name="adamax", flops=10, moments=("first_moment", "infinity_norm")),
        # As Adam; the rectification scales the step.
        UpdateRule(name="radam", flops=12, moments=("first_moment", "second_moment")),
    )
}
"""Optimizers of graphs with state, by name."""

OPTIMIZERS: Final = {name: UPDATE_RULES[name] for name in ("sgd", "adam")}
"""Optimizers of graphs without state, by name."""


def make_update_node(
    optimizer: str, weight_gradients: Sequence[str], *, parameters: int, item_bytes: int
) -> Node:
    """Return the last node, which updates all weights of a step without state in the graph.

    It reads `weight_gradients`, 0-byte tensors that order it, and is not recomputable, so that no
    operator is recomputed with updated weights.
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
"""The value of `state` for a step that trains no weight."""
STATES: Final = (*UPDATE_RULES, FROZEN)
"""Values of `state`: an optimizer, or ``frozen`` for weights that are only read."""

ALL: Final = "all"
"""The default of `train`: all weights."""
_PATTERNS: Final = {ALL: "*", "biases": "*.bias"}
"""Named values of `train`, with the patterns of parameter names that they stand for."""

_STATISTICS_UPDATE_FLOPS: Final = 10
"""Work of updating running statistics, per channel [FLOP].

Square the inverse deviation and invert the result, subtract epsilon, remove the bias: 4; update
both averages: 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """Options of a step with state in its graph: optimizer, trained weights, tiles."""

    rule: UpdateRule | None
    """The optimizer; None if no weight is trained."""
    train: str = ALL
    """``all``, ``last-N``, ``biases``, or a pattern of names of weights or layers."""
    tile_bytes: int | None = None
    """Maximum size of a tile of a weight [B], unless one output channel is larger; None for whole
    weights."""

    @classmethod
    def parse(
        cls, state: str | None, *, train: str | None, tile: str | int | None, optimizer: str | None
    ) -> StateOptions | None:
        """Parse options of a network, or refuse them; None without `state`. Accepts any `train`."""
        if state is None:
            for name, value in (("train", train), ("tile", tile)):
                if value is not None:
                    raise InputError(
                        f"{name}: {value!r} is for a step with state in its graph; give state too, "
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

    def apply_to(self, declarations: Sequence[Declaration]) -> list[Declaration]:
        """Return the operators without gradients of untrained weights, split by `tile_bytes`.

        A batch norm whose weight is not trained becomes its `untrained_variant`.
        """
        trained_names = self._trained_weight_names(declarations)
        return [
            self._split_into_tiles(_omit_untrained_gradients(declaration, trained_names))
            for declaration in declarations
        ]

    def _trained_weight_names(self, declarations: Sequence[Declaration]) -> frozenset[str]:
        """Return the names of the weights that `train` selects; empty without an optimizer.

        ``last-N``: the last N operators with weights that are no norms, and all norms after them.
        """
        layers = [declaration for declaration in declarations if declaration.weights]
        if self.rule is None:
            return frozenset()
        if not layers:
            raise InputError("train: no layer of the network has weights; leave it out")
        prefix, _, n_layers = self.train.partition("-")
        if prefix == "last" and n_layers.isdecimal():
            # A norm does not count: it belongs to the layer before it.
            layer_starts = [k for k, layer in enumerate(layers) if not layer.is_one_kernel]
            if not 1 <= int(n_layers) <= len(layer_starts):
                raise InputError(
                    f"train: expected last-1 to last-{len(layer_starts)}, got {self.train!r}"
                )
            layers = layers[layer_starts[-int(n_layers)] :]
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
                f"as '{layers[-1].name}*', got {self.train!r}, which matches none of them"
            )
        return names

    def _split_into_tiles(self, declaration: Declaration) -> Declaration:
        """Return the operator with weights and their gradients in tiles, if `tile_bytes` is set."""
        if self.tile_bytes is None:
            return declaration
        return replace(
            declaration,
            weights=tuple(
                tile for weight in declaration.weights for tile in self._weight_tiles(weight)
            ),
            parts=tuple(tile for part in declaration.parts for tile in self._gradient_tiles(part)),
        )

    def _weight_tiles(self, weight: Weight) -> tuple[Weight, ...]:
        return (weight,) if self.tile_bytes is None else weight.split_into_tiles(self.tile_bytes)

    def _gradient_tiles(self, part: Gradient) -> list[Gradient]:
        """Divide a weight gradient into one part per tile, with FLOP in proportion to channels."""
        reads = tuple(tile for weight in part.reads for tile in self._weight_tiles(weight))
        if not isinstance(part.target, Weight):
            return [replace(part, reads=reads)]
        tiles = self._weight_tiles(part.target)
        if len(tiles) == 1:
            return [replace(part, reads=reads)]
        flops = _split_amount(part.flops, tiles)
        accumulation_bytes = _split_amount(part.accumulation_bytes_moved or 0, tiles)
        return [
            replace(
                part,
                suffix=f"{part.suffix}.{number}",
                target=tile,
                reads=reads,
                flops=flops[number],
                accumulation_bytes_moved=None
                if part.accumulation_bytes_moved is None
                else accumulation_bytes[number],
            )
            for number, tile in enumerate(tiles)
        ]


def _split_amount(amount: int, tiles: Sequence[Weight]) -> list[int]:
    """Divide `amount` among tiles in proportion to their channels; the integers sum to `amount`."""
    ends = list(accumulate((tile.shape[0] for tile in tiles), initial=0))
    return [amount * end // ends[-1] - amount * begin // ends[-1] for begin, end in pairwise(ends)]


def _omit_untrained_gradients(
    declaration: Declaration, trained_names: frozenset[str]
) -> Declaration:
    """Return an operator without gradients of untrained weights, input gradients first.

    Input gradients read weights that the update replaces.
    """
    if (
        declaration.untrained_variant is not None
        and declaration.weights[0].name not in trained_names
    ):
        declaration = declaration.untrained_variant
    value_parts = [part for part in declaration.parts if isinstance(part.target, Value)]
    weight_parts = [
        part
        for part in declaration.parts
        if isinstance(part.target, Weight) and part.target.name in trained_names
    ]
    return replace(declaration, parts=(*value_parts, *weight_parts))


class StateNodeBuilder:
    """Makes the nodes that hold state tensors and the nodes that make their replacements."""

    def __init__(self, rule: UpdateRule | None) -> None:
        self._rule = rule
        self._names_with_node: set[str] = set()

    def make_missing_nodes(self, *weights: Weight, op: str = "parameter") -> list[Node]:
        """Return new nodes that hold those `weights` that have no node yet; record their names."""
        missing_weights = [weight for weight in weights if weight.name not in self._names_with_node]
        self._names_with_node.update(weight.name for weight in missing_weights)
        return [
            Node(
                name=weight.name,
                op=op if weight.trainable else "running_statistic",
                phase=Phase.STATE,
                outputs=(Tensor(name=weight.name, bytes=weight.bytes),),
            )
            for weight in missing_weights
        ]

    def make_update_nodes(
        self, name: str, weight_gradients: Sequence[tuple[Weight, str]]
    ) -> list[Node]:
        """Return nodes for new moments, then the update node `name`; [] without an optimizer."""
        rule = self._rule
        if rule is None:
            return []
        moments = [
            replace(weight, name=f"{weight.name}.{moment}", item_bytes=FLOAT_BYTES)
            for weight, _ in weight_gradients
            for moment in rule.moments
        ]
        state_tensors = [*(weight for weight, _ in weight_gradients), *moments]
        n_parameters = sum(weight.size for weight, _ in weight_gradients)
        update = Node(
            name=name,
            op=f"{rule.name}_update",
            phase=Phase.UPDATE,
            inputs=(
                *(gradient for _, gradient in weight_gradients),
                *(tensor.name for tensor in state_tensors),
            ),
            outputs=tuple(map(_replacement_tensor, state_tensors)),
            flops=rule.flops * n_parameters,
            recomputable=False,
            bytes_moved=rule.bytes_moved(weight_gradients[0][0].item_bytes) * n_parameters,
        )
        return [*self.make_missing_nodes(*moments, op="moment"), update]

    def make_statistics_nodes(self, declaration: Declaration) -> list[Node]:
        """Return nodes for new running statistics, if any, then the node that updates them all."""
        statistics = declaration.running_statistics
        if not statistics:
            return []
        inputs = (*declaration.outputs[1:], *statistics)
        update = Node(
            name=f"{declaration.name}.running",
            op="running_statistics",
            phase=Phase.UPDATE,
            inputs=tuple(tensor.name for tensor in inputs),
            outputs=tuple(map(_replacement_tensor, statistics)),
            flops=_STATISTICS_UPDATE_FLOPS * statistics[0].size,
            recomputable=False,
        )
        return [*self.make_missing_nodes(*statistics), update]


def _replacement_tensor(weight: Weight) -> Tensor:
    return Tensor(name=f"{weight.name}+", bytes=weight.bytes, replaces=weight.name)
