"""Eager forward passes before a capture, whose effects on tensors and generators are undone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.capturing.inputs import copy_inputs
from poetmodel.torch.capturing.modules import GeneratorStates, ModuleSnapshot
from poetmodel.torch.capturing.surroundings import refuse_seeding
from poetmodel.torch.errors import CaptureError, at_line, convert_exceptions
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def draw_message(name: str, generator: str, line: str = "") -> str:
    """Return the message for a draw in a forward pass from a generator that is not PyTorch's."""
    return (
        f"{name}: forward draws from {generator}{at_line(line)}, and a compiled step would repeat "
        "the numbers of the capture; draw with PyTorch (torch.rand, ...), or outside of the step "
        "and pass it as an input"
    )


class Passes:
    """Executes forward passes of a module in eager mode; undoes what they write and draw.

    `snapshot` restores modules. A pass executes a function, or the module on copies of its inputs.
    """

    def __init__(self, name: str, module: torch.nn.Module, flat_inputs: Sequence[Any]) -> None:
        self.name, self._module, self._flat_inputs = name, module, tuple(flat_inputs)
        self.snapshot = ModuleSnapshot(module)
        self.generator_states = GeneratorStates(name, self.snapshot)
        self.drawn = ""
        """The generator from which the last pass has drawn; "" if from none but PyTorch's."""
        self._keeps_new = False
        self._written_tensors = WrittenTensors(module.buffers())

    def restore(self, *, keeps_new: bool | None = None) -> None:
        """Restore modules; new attributes without tensors stay if `keeps_new` was True last."""
        self._keeps_new = self._keeps_new if keeps_new is None else keeps_new
        self.snapshot.restore(keeps_new=self._keeps_new)

    def execute(
        self, function: Callable[[], object] | None = None, *, may_draw: bool = False
    ) -> list[torch.Tensor]:
        """Execute a pass; return copied results. Seeding or a failure is a `CaptureError`.

        So is a number of a generator that is not PyTorch's, unless the pass `may_draw`.
        """
        results: list[torch.Tensor] = []
        try:
            with (
                torch.random.fork_rng(devices=[]),
                self.generator_states.restore_at_end(),
                warnings.catch_warnings(action="ignore"),
                convert_exceptions(self.name),
                refuse_seeding(),
                self._written_tensors,
            ):
                if function is None:
                    outputs = self._module(*copy_inputs(self._flat_inputs))
                    results += [tensor.detach().clone() for tensor in tensors_in(outputs)]
                else:
                    function()
                self.drawn = self.generator_states.drawn()
                if self.drawn and not may_draw:
                    raise CaptureError(draw_message(self.name, self.drawn))
        finally:
            self._written_tensors.restore()
        return results


class WrittenTensors(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Dispatch mode that saves the values of existing tensors before a forward pass writes them.

    Parameters
    ----------
    buffers : iterable of torch.Tensor
        Tensors that are saved at once, whether or not an operator writes them.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._created_keys: set[int] = set()
        """Storage keys of tensors that the forward pass created."""
        self._saved_storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """(storage, copy of its old content), by storage key."""
        for buffer in buffers:
            self._save(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Save the existing tensors that the schema of an operator writes; call the operator."""
        keywords = kwargs or {}
        schema = func._schema  # noqa: SLF001 - the only source of writes
        for position, argument in enumerate(schema.arguments if schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else keywords.get(argument.name)
                for tensor in tensors_in(value):
                    self._save(tensor)
        outputs = func(*args, **keywords)
        input_keys = {storage_key(tensor) for tensor in tensors_in((args, keywords))}
        self._created_keys.update(
            {storage_key(tensor) for tensor in tensors_in(outputs)} - input_keys
        )
        return outputs

    def _save(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._created_keys and key not in self._saved_storages and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self._saved_storages[key] = (storage, storage.clone())

    def restore(self) -> None:
        """Restore the saved values, and clear the record of tensors that the forward pass created.

        The next pass may thus save these tensors, too. The saved values remain for further
        restorations.
        """
        for storage, values in self._saved_storages.values():
            storage.copy_(values)
        self._created_keys.clear()
