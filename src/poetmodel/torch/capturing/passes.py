"""Eager forward passes before a capture, whose effects on tensors and generators are undone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.capturing.inputs import copy_inputs
from poetmodel.torch.capturing.modules import GeneratorStates, ModuleSnapshot
from poetmodel.torch.capturing.state_changes import WrittenTensors
from poetmodel.torch.capturing.surroundings import refuse_seeding
from poetmodel.torch.errors import convert_exceptions
from poetmodel.torch.graph.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Passes:
    """Executes forward passes of a module in eager mode; undoes what they write and draw.

    `snapshot` restores modules. A pass executes a function, or the module on copies of its inputs.
    """

    def __init__(self, name: str, module: torch.nn.Module, flat_inputs: Sequence[Any]) -> None:
        self._name, self._module, self._flat_inputs = name, module, tuple(flat_inputs)
        self.snapshot = ModuleSnapshot(module)
        self.generator_states = GeneratorStates(name, self.snapshot)
        self._keeps_new = False
        self._written_tensors = WrittenTensors(module.buffers())

    def restore(self, *, keeps_new: bool | None = None) -> None:
        """Restore modules; new attributes without tensors stay if `keeps_new` was True last."""
        self._keeps_new = self._keeps_new if keeps_new is None else keeps_new
        self.snapshot.restore(keeps_new=self._keeps_new)

    def execute(self, function: Callable[[], object] | None = None) -> list[torch.Tensor]:
        """Execute a pass; return copied results. A draw, seeding or failure is a `CaptureError`."""
        results: list[torch.Tensor] = []
        try:
            with (
                torch.random.fork_rng(devices=[]),
                self.generator_states.restore_at_end(),
                warnings.catch_warnings(action="ignore"),
                convert_exceptions(self._name),
                refuse_seeding(),
                self._written_tensors,
            ):
                if function is None:
                    outputs = self._module(*copy_inputs(self._flat_inputs))
                    results += [tensor.detach().clone() for tensor in tensors_in(outputs)]
                else:
                    function()
                self.generator_states.check()
        finally:
            self._written_tensors.restore()
        return results
