"""The captures of TorchDynamo that share one joint graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.capturing.front import Changed
from poetmodel.torch.capturing.inputs import unflatten
from poetmodel.torch.capturing.process_state import HeldContainers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.torch.capturing.front import Capture, Execute, StepFront


class StepCaptures:
    """Calls a step under the guards of the captures whose graph is that of a joint graph.

    `input_spec` is the nesting of flat `inputs`. `constants`: position of each constant among the
    inputs of Dynamo's graph, by attribute. `is_settled`: forward stops changing what it reads.
    """

    def __init__(
        self,
        front: StepFront,
        captures: Sequence[Capture],
        inputs: Sequence[Any],
        input_spec: Any,
        constants: Mapping[str, int],
        *,
        is_settled: bool,
    ) -> None:
        self.front, self.constants, self.is_settled = front, constants, is_settled
        self._captures, self._inputs, self._input_spec = tuple(captures), inputs, input_spec
        parts = [m for m in (front.model, front.loss_fn) if isinstance(m, torch.nn.Module)]
        self._held = HeldContainers(module for part in parts for module in part.modules())
        self._known_captures = tuple(front.captures)
        readings = [r for r in captures[0].readings if not r.is_late]
        self.readings = tuple({(r.line, r.kind): r for r in reversed(readings)}.values())
        """Values that Python reads of inputs and buffers, one for each line."""

    def _batch(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return flat inputs in their nesting; tensors get the classes of the capture."""
        values = [
            value.as_subclass(type(example))
            if isinstance(value, torch.Tensor) and type(value) is not type(example)
            else value
            for value, example in zip(inputs, self._inputs, strict=True)
        ]
        return unflatten(values, self._input_spec)

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
        captured = self._captures[0].tensors
        return {
            key: tensors[position]
            for key, position in self.constants.items()
            if tensors[position] is not captured[position]
        }

    def arrange(self, capture: Capture, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a value for each output of a captured graph; unread outputs get any value."""
        nodes = capture.graph_module.graph.output_node().args[0]
        positions = (*capture.result_positions, *capture.stored_positions)
        value_of = {nodes[p]: value for p, value in zip(positions, results, strict=True)}
        return [value_of.get(node, results[0]) for node in nodes]

    def __contains__(self, capture: object) -> bool:
        return any(capture is member for member in self._captures)
