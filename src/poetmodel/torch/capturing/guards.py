"""Guards: check the assumptions of a captured step before a call, and refuse unsupported calls."""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from poetmodel.errors import join_names
from poetmodel.torch.capturing.inputs import is_plain
from poetmodel.torch.capturing.joint_graph import InputKind, Joint, Lookup, OutputKind, format_path
from poetmodel.torch.capturing.modules import has_hooks
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.tensors import storage_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


HOOKS: Final = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)  # fmt: skip
"""Attributes of a module that contain the hooks of its forward and backward passes."""

# -- guards ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Properties of inputs and modules on which a captured step depends."""

    inputs: tuple[Any, ...]
    """`_guarded_properties` of each flat input, whether a tensor or not."""
    modules: tuple[int, ...]
    """``id`` of each module."""
    training: tuple[bool, ...]
    """Whether each module is in training mode."""
    hooks: tuple[tuple[int, ...], ...]
    """Keys of the `HOOKS` of each module; the hooks are part of the graph."""
    tensors: tuple[Any, ...]
    """`_guarded_properties` of each parameter and buffer; empty if modules were added, removed or
    replaced, or a parameter or buffer is missing."""
    aliases: tuple[int, ...]
    """For each of `tensors`, then for each input that the step changes or differentiates: the index
    of the first of them that is the same tensor."""
    overlaps: tuple[int | None, ...]
    """For each input: the index, among the tensors that the step may change, of the first that
    overlaps it in memory. An input that the step changes overlaps itself. None if no tensor
    overlaps it, and for inputs that are no plain tensors. Empty if the step changes no tensor, or
    `tensors` is empty."""
    autocast: bool
    """Whether autocast on the CPU is on around the step; autocast inside the model is part of the
    graph."""


class Guards:
    """Checks whether a captured step is valid for a call, by properties of state and inputs.

    They must be those at construction, and values that Python code read those of the capture.
    Construction and checks raise `CaptureError` if no compiled step supports the call: in inference
    mode, for inputs computed from other tensors that require a gradient, and in a step with updates
    for gradient hooks of parameters.
    """

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        named_modules = tuple(joint.module.named_modules())
        self._module_names = tuple(format_path(path) or "the model" for path, _ in named_modules)
        # While these references exist, no new module can have the id of one of them.
        self._modules = tuple(module for _, module in named_modules)
        self._module_ids = tuple(map(id, self._modules))
        result_targets = {result.target for result in joint.results}
        target_inputs = [
            argument
            for argument in joint.arguments_of(InputKind.USER_INPUT)
            if argument in result_targets
        ]
        self._target_positions = tuple(argument.position for argument in target_inputs)
        self._alias_names = tuple(
            argument.name for argument in (*joint.module_arguments, *target_inputs)
        )
        mutated_arguments = {
            result.target for result in joint.results if result.kind is OutputKind.MUTATION
        }
        updated_arguments = joint.module_arguments if joint.optimizer is not None else ()
        changed_arguments = [
            argument
            for argument in joint.module_arguments
            if argument in mutated_arguments or argument in updated_arguments
        ]
        self._find_changed_tensors = Lookup([argument.target for argument in changed_arguments])
        """Finds the parameters and buffers that the step may change, given the captured module.

        With an optimizer, these are all parameters and buffers.
        """
        self._changed_inputs = [
            argument.position for argument in target_inputs if argument in mutated_arguments
        ]
        """Positions of the flat inputs that the step changes."""
        self._changed_names = [argument.name for argument in changed_arguments]
        self._changed_names += [joint.input_names[position] for position in self._changed_inputs]
        self._constants = tuple(_constant_holders(joint, self._module_names, self._modules))
        """(attributes of a module, key, name for display, constant tensor), by
        `_constant_holders`."""
        self.compiled_assumptions = self._collect_assumptions(joint.inputs)
        """Assumptions at the compilation of the step."""
        parents = [module for module in self._modules if module._modules]  # noqa: SLF001
        self._submodules = [module._modules for module in parents]  # noqa: SLF001
        self._old_submodules = [dict(submodules) for submodules in self._submodules]
        self._attributes = list(map(vars, self._modules))
        self._training = list(self.compiled_assumptions.training)
        graph_tensors = joint.captures.tensors
        positions = {id(tensor): position for position, tensor in enumerate(graph_tensors)}
        self._unguarded_positions = [
            position for position, value in enumerate(joint.inputs) if id(value) not in positions
        ]
        """Positions of the flat inputs that are no inputs of Dynamo's graph."""
        may_hook = joint.optimizer is None
        self._tensors = _GraphTensors(graph_tensors, joint.inputs, may_hook=may_hook)
        changed_tensors = self._find_changed_tensors(joint.module)
        changed_positions = [positions[id(t)] for t in changed_tensors if id(t) in positions]
        self._changed_memory = _ChangedMemory(changed_positions, graph_tensors, joint.inputs)

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Return whether the step is valid for flat inputs and the current state."""
        return (
            self.hold_before(inputs)
            and self._collect_assumptions(inputs) == self.compiled_assumptions
            and not self._joint.captures.changes(inputs)
        )

    def hold_before(self, inputs: Sequence[Any]) -> bool:
        """Return whether the step is valid as far as a call under Dynamo's guards does not tell.

        If process and constant tensors are unchanged, raises `CaptureError` for a call that no
        compiled step supports.
        """
        joint = self._joint
        return (
            joint.captures.class_state.is_unchanged()
            and not any(joint.process_state.differences())
            and not any(joint.python_guards())
            and not any(self._replaced_constant_names())
            and self._hold_beside_dynamo(inputs)
            and (
                not joint.value_guards.reads
                or joint.value_guards.hold(joint.guarded_tensors(inputs))
            )
        )

    def _hold_beside_dynamo(self, inputs: Sequence[Any]) -> bool:
        """Return whether those assumptions hold that Dynamo guards only of what a step reads."""
        refuse_inference_mode()
        refuse_inputs(inputs)
        properties = self.compiled_assumptions.inputs
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        return (
            all(map(is_plain, tensors))  # Dynamo's guards crash on nested tensors
            and self._submodules == self._old_submodules
            and [attributes.get("training") for attributes in self._attributes] == self._training
            and all(
                _guarded_properties(inputs[position]) == properties[position]
                for position in self._unguarded_positions
            )
        )

    def hold_within(self, inputs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors of Dynamo's graph share memory as before, without wrong hooks."""
        if not self._tensors.are_as_before(tensors):
            return False
        overlaps = self.compiled_assumptions.overlaps
        if self._changed_inputs or any(index is not None for index in overlaps):
            return self._overlapping_indices(inputs) == overlaps
        return not self._changed_memory.overlaps(tensors, inputs)

    def differences(self, inputs: Sequence[Any]) -> Iterator[str]:
        """Yield a text for each difference of flat inputs and state from those at compilation.

        Differences that follow from missing modules or tensors are omitted. Raises `CaptureError`
        if no compiled step supports the call.
        """
        compiled_assumptions, current_assumptions = (
            self.compiled_assumptions,
            self._collect_assumptions(inputs),
        )
        yield from _property_differences(
            self._joint.input_names, compiled_assumptions.inputs, current_assumptions.inputs
        )
        if compiled_assumptions.modules != current_assumptions.modules:
            yield _describe_replaced(
                self._module_names, compiled_assumptions.modules, current_assumptions.modules
            )
            return
        arguments = self._joint.module_arguments
        if len(arguments) != len(current_assumptions.tensors):
            yield "a parameter or a buffer is missing"
            return
        argument_names = [argument.name for argument in arguments]
        yield from _property_differences(
            argument_names, compiled_assumptions.tensors, current_assumptions.tensors
        )
        yield from _alias_differences(
            self._alias_names, compiled_assumptions.aliases, current_assumptions.aliases
        )
        names = self._joint.input_names
        for name, old_index, new_index in zip(
            names, compiled_assumptions.overlaps, current_assumptions.overlaps, strict=False
        ):
            if old_index != new_index:
                index = old_index if new_index is None else new_index
                changed_name = self._changed_names[index or 0]  # `index` is not None here
                verb = "shares no memory" if new_index is None else "shares memory"
                yield f"{name} {verb} with {changed_name}, which the step may change"
        yield from self._module_differences(current_assumptions)
        replaced_constants = [*self._replaced_constant_names()]
        yield from (f"{name} is another tensor, or missing" for name in replaced_constants)
        other_differences = [
            *self._joint.captures.class_state.differences(),
            *self._joint.process_state.differences(),
            *self._joint.python_guards(),
        ]
        yield from other_differences
        if (
            compiled_assumptions == current_assumptions
            and not replaced_constants
            and not other_differences
        ):
            tensors = self._joint.guarded_tensors(inputs)
            texts = [*self._joint.value_guards.differences(tensors)]
            yield from texts or self._joint.captures.changes(inputs)

    def _overlapping_indices(self, inputs: Sequence[Any]) -> tuple[int | None, ...]:
        """Return, for each input, the index of the first changed tensor that overlaps it, or None.

        The index is that in `_changed_names`; the result is empty if the step changes none.
        """
        if not self._changed_names:
            return ()
        changed_tensors = [
            *self._find_changed_tensors(self._joint.module),
            *(inputs[position] for position in self._changed_inputs),
        ]
        indices_by_storage: dict[int, list[int]] = {}
        for index, tensor in enumerate(changed_tensors):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):  # it may have been replaced
                indices_by_storage.setdefault(storage_key(tensor), []).append(index)
        return tuple(
            next(
                (
                    index
                    for index in indices_by_storage.get(storage_key(value), ())
                    if _is_overlapping(changed_tensors[index], value)
                ),
                None,
            )
            if isinstance(value, torch.Tensor) and is_plain(value)
            else None
            for value in inputs
        )

    def _replaced_constant_names(self) -> Iterator[str]:
        """Yield each name under which a constant is replaced by another object, or missing."""
        for holder, key, name, constant in self._constants:
            if holder.get(key) is not constant:
                yield name

    def _module_differences(self, current_assumptions: Assumptions) -> Iterator[str]:
        """Yield a text for changed training modes, each module with changed hooks, and autocast."""
        compiled_assumptions = self.compiled_assumptions
        # The first module wraps the model and its loss, and never changes.
        if compiled_assumptions.training[1:] != current_assumptions.training[1:]:
            yield "modules were switched into or out of training mode"
        for name, hooks, current_hooks in zip(
            self._module_names, compiled_assumptions.hooks, current_assumptions.hooks, strict=True
        ):
            if hooks != current_hooks:
                yield f"hooks of {name} were added or removed"
        if compiled_assumptions.autocast != current_assumptions.autocast:
            yield "autocast is on around the step: use it inside the model and the loss"

    def _collect_assumptions(self, inputs: Sequence[Any]) -> Assumptions:
        """Return the current assumptions of a step on flat inputs; refuses unsupported calls."""
        joint = self._joint
        modules = tuple(joint.module.modules())
        module_attributes = [module.__dict__ for module in modules]
        module_ids = tuple(map(id, modules))
        try:
            tensors = joint.module_tensors() if module_ids == self._module_ids else []
        except AttributeError:
            tensors = []
        refuse_inference_mode()
        refuse_inputs(inputs)
        hooked_names = [
            argument.name
            for argument, tensor in zip(joint.module_arguments, tensors, strict=False)
            if joint.optimizer is not None and has_hooks(tensor)
        ]
        if hooked_names:
            raise CaptureError(
                f"{joint.name}: {join_names(hooked_names)}: a step with an optimizer updates "
                "without calling hooks of parameters (register_hook, "
                "register_post_accumulate_grad_hook); remove them, or leave optimizer= out"
            )
        first_index_of: dict[int, int] = {}
        tensor_ids = (
            *map(id, tensors),
            *(id(inputs[position]) for position in self._target_positions),
        )
        return Assumptions(
            inputs=tuple(map(_guarded_properties, inputs)),
            modules=module_ids,
            training=tuple([attributes.get("training") for attributes in module_attributes]),
            hooks=tuple(
                [tuple(chain(*map(attributes.get, HOOKS))) for attributes in module_attributes]
            ),
            tensors=tuple(map(_guarded_properties, tensors)),
            aliases=tuple(
                [
                    first_index_of.setdefault(tensor_id, index)
                    for index, tensor_id in enumerate(tensor_ids)
                ]
            ),
            overlaps=self._overlapping_indices(inputs) if tensors else (),
            autocast=torch.is_autocast_enabled("cpu"),
        )


def _is_overlapping(tensor_a: torch.Tensor, tensor_b: torch.Tensor) -> bool:
    """Return whether two tensors in one storage overlap, from first to last element."""
    tensors = (tensor_a, tensor_b)
    begins = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    ends = [begin + _span_bytes(tensor) for begin, tensor in zip(begins, tensors, strict=True)]
    return bool(max(begins) < min(ends))


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in dimensions) if tensor.numel() else 0
    return int(span * tensor.element_size())


class _GraphTensors:
    """The inputs of Dynamo's graph: distinct as at its capture; without hooks unless `may_hook`.

    Dynamo guards no parameter against being tied or hooked later. `inputs` change in each call; the
    others are looked at again only if one is another object, or if a hook was added to anything.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], inputs: Iterable[Any], *, may_hook: bool
    ) -> None:
        self._may_hook = may_hook
        input_ids = set(map(id, inputs))
        ids = [*map(id, tensors)]
        self._input_positions = [p for p, key in enumerate(ids) if key in input_ids]
        self._n_inputs = len(input_ids.intersection(ids))
        self._n_others = len(set(ids).difference(input_ids))
        self._ids: list[int | None] = []
        """``id`` of each of the others, as last looked at; None for inputs."""
        self._next_hook = -1
        """Number of the next hook of any tensor or module when the others were looked at."""

    def are_as_before(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether current tensors are distinct as before, and have no forbidden hook."""
        ids: list[int | None] = [*map(id, tensors)]
        input_ids = {ids[position] for position in self._input_positions}
        for position in self._input_positions:
            ids[position] = None
        next_hook = RemovableHandle.next_id
        if ids != self._ids or next_hook != self._next_hook:
            others = [t for t, key in zip(tensors, ids, strict=True) if key is not None]
            if len(set(map(id, others))) != self._n_others:
                return False
            if not self._may_hook and any(map(has_hooks, others)):
                return False
            self._ids, self._next_hook = ids, next_hook
        return len(input_ids) == self._n_inputs and input_ids.isdisjoint(ids)


class _ChangedMemory:
    """The memory of the tensors that a step changes, at `positions` among those of its graph.

    `inputs` are the flat inputs at the capture.
    """

    def __init__(
        self,
        positions: Sequence[int],
        graph_tensors: Sequence[torch.Tensor],
        inputs: Sequence[Any],
    ) -> None:
        self._positions = positions
        self._spans = [_span_bytes(graph_tensors[position]) for position in positions]
        self._inputs = [
            (position, _span_bytes(value))
            for position, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and is_plain(value)
        ]
        """(position, number of bytes) of each input that is a plain tensor."""
        self._addresses: list[int] = []
        self._begins: list[int] = []
        self._ends: list[int] = []

    def overlaps(self, tensors: Sequence[torch.Tensor], inputs: Sequence[Any]) -> bool:
        """Return whether any of the inputs overlaps any of the changed tensors."""
        if not self._positions:
            return False
        addresses = [*map(_ADDRESS, [tensors[position] for position in self._positions])]
        if addresses != self._addresses:
            self._addresses = addresses
            ranges = sorted(zip(addresses, self._spans, strict=True))
            self._begins = [begin for begin, _ in ranges]
            self._ends = list(accumulate((begin + span for begin, span in ranges), max))
        for position, span in self._inputs:
            begin = _ADDRESS(inputs[position])
            n_before = bisect_right(self._begins, begin + span - 1)
            if n_before and self._ends[n_before - 1] > begin:
                return True
        return False


_ADDRESS: Final = torch.Tensor.data_ptr


def _constant_holders(
    joint: Joint, names: Sequence[str], modules: Sequence[torch.nn.Module]
) -> Iterator[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """Yield (dict, its key, display name, tensor) of attributes and globals that are constants."""
    constants = {
        id(value) for value in map(joint.value, joint.arguments_of(InputKind.CONSTANT_TENSOR))
    }
    if not constants:
        return
    holders = [(name, vars(module)) for name, module in zip(names, modules, strict=True)]
    holders += [
        (module.__name__, vars(module))
        for module in list(sys.modules.values())
        if type(module) is ModuleType
    ]
    for name, holder in holders:
        for key, value in list(holder.items()):
            if id(value) in constants:
                yield holder, key, f"{name}.{key}", value


# -- calls that no compiled step supports ------------------------------------------------------


def refuse_inference_mode() -> None:
    """Raise `CaptureError` in inference mode, whose tensors cannot be trained on."""
    if torch.is_inference_mode_enabled():
        raise CaptureError("inference mode is on: compile and call a training step outside of it")


def refuse_inputs(inputs: Iterable[Any]) -> None:
    """Raise `CaptureError` if a flat input requires a gradient, and is no leaf."""
    for position, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise CaptureError(
                f"inputs[{position}] requires a gradient and was computed from other tensors, "
                "which would get no gradient from the step. Pass "
                f"inputs[{position}].detach(), or move the computation into the model"
            )


# -- differences as text -----------------------------------------------------------------------


def _guarded_properties(value: Any) -> Any:
    """Return the properties that guards compare: of a plain tensor its layout, not its values.

    Those of any other object are (type, text): by the text NaN equals itself, and by the type 1
    differs from 1.0.
    """
    if not isinstance(value, torch.Tensor):
        return (type(value), repr(value))
    if not is_plain(value):
        return (type(value), f"a {type(value).__name__} of layout {value.layout}")
    return (value.shape, value.dtype, value.stride(), value.device, value.requires_grad)


def _format_properties(properties: Any) -> str:
    """Return the result of `_guarded_properties` as text."""
    if len(properties) == 2:  # noqa: PLR2004 - no plain tensor: type, text
        return str(properties[1])
    shape, dtype, stride, device, requires_grad = properties
    layout = f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}"
    return f"{layout} on {device}" + (", requiring a gradient" if requires_grad else "")


def _property_differences(
    names: Iterable[str], old_properties: Iterable[Any], new_properties: Iterable[Any]
) -> Iterator[str]:
    """Yield a text for each object whose `_guarded_properties` have changed."""
    for name, old_property, new_property in zip(names, old_properties, new_properties, strict=True):
        if old_property != new_property:
            yield (
                f"{name} was {_format_properties(old_property)} and is "
                f"{_format_properties(new_property)}"
            )


def _describe_replaced(names: Sequence[str], old_ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """Return a text with names of replaced or removed modules, or about added ones, by ``id``."""
    if len(old_ids) == len(new_ids):
        replaced_names = [
            name
            for name, old_id, new_id in zip(names, old_ids, new_ids, strict=True)
            if old_id != new_id
        ]
    else:
        present_ids = set(new_ids)
        replaced_names = [
            name for name, old_id in zip(names, old_ids, strict=True) if old_id not in present_ids
        ]
    if not replaced_names:
        return "modules were added to the model"
    return f"{join_names(replaced_names)}: replaced by another module, or removed"


def _alias_differences(
    names: Sequence[str], old_aliases: Sequence[int], new_aliases: Sequence[int]
) -> Iterator[str]:
    """Yield texts for each tensor whose alias, the index of the first same tensor, has changed."""
    for index, (old_alias, new_alias) in enumerate(zip(old_aliases, new_aliases, strict=True)):
        if old_alias == new_alias:
            continue
        if old_alias != index:
            yield f"{names[index]} was the same tensor as {names[old_alias]} and is not"
        if new_alias != index:
            yield f"{names[index]} was not the same tensor as {names[new_alias]} and is"
