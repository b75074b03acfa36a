"""The captures of TorchDynamo that share one joint graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.capturing.front import Changed
from poetmodel.torch.capturing.inputs import Nesting
from poetmodel.torch.capturing.process_state import ClassState, HeldContainers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.torch.capturing.front import Capture, Execute, StepFront


class StepCaptures:
    """Calls a step under the guards of the captures whose graph is that of a joint graph.

    `input_spec` is the nesting of flat `inputs`. Positions among the inputs of Dynamo's graph:
    `constants` by attribute, and `positions` of parameters and buffers by path. `is_settled`:
    forward stops changing what it reads.
    """

    def __init__(
        self,
        front: StepFront,
        captures: Sequence[Capture],
        inputs: Sequence[Any],
        input_spec: Any,
        constants: Mapping[str, int],
        positions: Mapping[str, int],
        *,
        is_settled: bool,
    ) -> None:
        self.front, self.is_settled = front, is_settled
        self.constants, self.positions = constants, positions
        self._captures = tuple(captures)
        self._kinds = [type(value) for value in inputs]
        self._rebuild = Nesting(input_spec).rebuild
        self.tensors = self._captures[0].tensors
        """The inputs of Dynamo's graph at the capture."""
        self._value_indices = {id(capture): _value_indices(capture) for capture in captures}
        parts = [m for m in (front.model, front.loss_fn) if isinstance(m, torch.nn.Module)]
        modules = [module for part in parts for module in part.modules()]
        self._held = HeldContainers(modules)
        self.class_state = ClassState(
            set(map(type, modules)).union(*(capture.classes for capture in captures)),
            frozenset().union(*(capture.code for capture in captures)),
        )
        """Methods whose code is in the graph."""
        self._known_captures = tuple(front.captures)
        readings = [r for r in captures[0].readings if not r.is_late]
        self.readings = tuple({(r.line, r.kind): r for r in reversed(readings)}.values())
        """Values that Python reads of inputs and buffers, one for each line."""

    def _batch(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return flat inputs in their nesting; tensors get the classes of the capture."""
        return self._rebuild(
            [
                value.as_subclass(kind)
                if type(value) is not kind and isinstance(value, torch.Tensor)
                else value
                for value, kind in zip(inputs, self._kinds, strict=True)
            ]
        )

    def changes(self, inputs: Sequence[Any]) -> tuple[str, ...]:
        """Return a text for each reason why no capture is valid for flat inputs; () if one is."""
        if differences := tuple(self._held.differences()):
            return differences
        try:
            capture, _ = self.front.find(self._batch(inputs))
        except Changed as change:
            return change.reasons or ("Python values that the step reads have changed",)
        if capture in self:
            return ()
        return ("forward has set Python values that it reads",)

    def is_expected(self, inputs: Sequence[Any]) -> bool:
        """Return whether what forward sets in its first passes needs another graph for a call."""
        try:
            capture, _ = self.front.find(self._batch(inputs))
        except Changed:
            return False
        return capture not in self and any(capture is known for known in self._known_captures)

    def call(self, inputs: Sequence[Any], execute: Execute) -> None:
        """Execute a step on flat inputs under the guards, as `StepFront.call`."""
        if differences := tuple(self._held.differences()):
            raise Changed(differences)
        self.front.call(self._batch(inputs), execute)

    def replaced_constants(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the constants that are other objects among the inputs of Dynamo's graph now."""
        return {
            key: tensors[position]
            for key, position in self.constants.items()
            if tensors[position] is not self.tensors[position]
        }

    def arrange(self, capture: Capture, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a value for each output of a captured graph; unread outputs get any value."""
        return [results[index] for index in self._value_indices[id(capture)]]

    def __contains__(self, capture: object) -> bool:
        return any(capture is member for member in self._captures)


def _value_indices(capture: Capture) -> list[int]:
    """Return the index among loss, outputs and stored tensors of each output of a graph, or 0."""
    nodes = capture.graph_module.graph.output_node().args[0]
    positions = (*capture.result_positions, *capture.stored_positions)
    index_of = {nodes[position]: index for index, position in enumerate(positions)}
    return [index_of.get(node, 0) for node in nodes]
