"""State of modules and random generators that a forward pass changes in a capture.

The capture restores this state, or refuses the step.
"""

from __future__ import annotations

import random
import sys
from collections import UserDict, UserList, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from poetmodel.torch.capturing.joint_graph import format_path
from poetmodel.torch.errors import FOREIGN_ERRORS, CaptureError
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class ModuleSnapshot:
    """A snapshot of the state of a step's modules, to be restored after forward passes.

    Covers attributes, hooks, submodules, classes and modes; containers and user objects
    (`is_user_object`) to which a module refers, also indirectly; ``requires_grad``, hooks and
    attributes of parameters and buffers; PyTorch's global module hooks. Values of tensors are not
    covered.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._classes = [(module, type(module)) for module in modules]
        self._tensors = [_TensorState(tensor) for tensor in (*model.parameters(), *model.buffers())]
        self._visited_ids = {id(module) for module in modules}
        global_names = vars(torch.nn.modules.module).items()
        hooks = [value for name, value in global_names if name.startswith("_global_")]
        self._containers = [
            _Snapshot(value, has_attributes=True) for value in hooks if isinstance(value, dict)
        ]
        self._n_global_containers = len(self._containers)
        """Number of containers of global hooks, which precede those of modules."""
        for module in modules:
            self._containers += self._containers_of(module)

    def _containers_of(self, module: torch.nn.Module) -> Iterator[_Snapshot]:
        """Yield the attributes of a module, and unvisited containers and user objects in them."""
        visited_ids = self._visited_ids  # containers of several modules are yielded once
        yield _Snapshot(vars(module), has_attributes=True)
        pending: list[Any] = list(vars(module).values())
        while pending:
            value = pending.pop()
            if isinstance(value, (*_PLAIN_TYPES, torch.Tensor)) or id(value) in visited_ids:
                continue
            visited_ids.add(id(value))
            if isinstance(value, torch.nn.Module) or is_user_object(value):
                value = vars(value)
            if isinstance(value, list | dict | set | deque):
                yield _Snapshot(value)
            elif not isinstance(value, tuple):
                continue
            items = value.values() if isinstance(value, dict) else value
            pending += [item for item in items if not isinstance(item, _PLAIN_TYPES)]

    def instances_of(self, types: tuple[type, ...]) -> Iterator[Any]:
        """Yield items and attributes of `types` in the snapshot, once for each container."""
        for container in self._containers:
            pending = list(container.values())
            while pending:
                value = pending.pop(0)
                if isinstance(value, types):
                    yield value
                elif isinstance(value, tuple):
                    pending += value

    def is_unchanged(self) -> bool:
        """Return whether all state is that of the snapshot."""
        return (
            all(type(module) is kind for module, kind in self._classes)
            and all(tensor.is_unchanged() for tensor in self._tensors)
            and all(container.is_unchanged() for container in self._containers)
        )

    def restore(self, *, keeps_new: bool = False) -> None:
        """Restore the snapshot; with `keeps_new`, new attributes without tensors remain."""
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for tensor in self._tensors:
            tensor.restore()
        for index, container in enumerate(self._containers):
            container.restore(keeps_new=keeps_new and index >= self._n_global_containers)


class _Snapshot:
    """A container, or the dict of an object's attributes, with a snapshot of the content."""

    def __init__(self, value: Any, *, has_attributes: bool = False) -> None:
        self._value, self._has_attributes = value, has_attributes
        self._old_content = _copy_content(value)

    def values(self) -> Iterable[Any]:
        """Return the items in the snapshot, without keys."""
        content = self._old_content
        return content.values() if isinstance(content, dict) else content

    def is_unchanged(self) -> bool:
        """Return whether the content is that of the snapshot."""
        return _has_same_objects(_copy_content(self._value), self._old_content)

    def restore(self, *, keeps_new: bool = False) -> None:
        """Restore the snapshot; with `keeps_new`, new attributes without tensors remain."""
        old_content, content = self._old_content, _copy_content(self._value)
        if _has_same_objects(content, old_content):
            return
        if not self._has_attributes:
            _replace_content(self._value, old_content)
            return
        for key in content.keys() | old_content.keys():
            if key in old_content:
                self._value[key] = old_content[key]
            elif not keeps_new or tensors_in(content[key]):
                del self._value[key]


class _TensorState:
    """A snapshot of ``requires_grad``, hooks and attributes of a module's tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._requires_grad = tensor.requires_grad
        self._attributes = dict(vars(tensor))
        self._hooks = {name: dict(getattr(tensor, name) or {}) for name in _TENSOR_HOOKS}
        self._unset_hooks = {name for name in _TENSOR_HOOKS if getattr(tensor, name) is None}

    def is_unchanged(self) -> bool:
        """Return whether ``requires_grad``, hooks and attributes are those of the snapshot."""
        tensor = self._tensor
        are_hooks_unchanged = all(
            _has_same_objects(dict(getattr(tensor, name) or {}), old_hooks)
            for name, old_hooks in self._hooks.items()
        )
        is_flag_unchanged = tensor.requires_grad == self._requires_grad
        return (
            is_flag_unchanged
            and are_hooks_unchanged
            and _has_same_objects(vars(tensor), self._attributes)
        )

    def restore(self) -> None:
        """Restore ``requires_grad`` of a leaf, hooks and attributes."""
        tensor = self._tensor
        if tensor.requires_grad != self._requires_grad and tensor.is_leaf:
            tensor.requires_grad_(self._requires_grad)
        for name, hooks in self._hooks.items():
            current_hooks = getattr(tensor, name)
            if current_hooks is not None and name in self._unset_hooks:
                setattr(tensor, name, None)
            elif current_hooks is not None and not _has_same_objects(dict(current_hooks), hooks):
                _replace_content(current_hooks, hooks)
        if not _has_same_objects(vars(tensor), self._attributes):
            _replace_content(vars(tensor), self._attributes)


_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor that contain its hooks."""
_find_hooks: Final = attrgetter(*_TENSOR_HOOKS)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether PyTorch calls a hook when a tensor gets its gradient."""
    return any(_find_hooks(tensor)) and tensor.requires_grad


@contextmanager
def without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context manager in which tensors have no gradient hooks."""
    removed = [
        (hooks, dict(hooks)) for hooks in chain.from_iterable(map(_find_hooks, tensors)) if hooks
    ]
    for hooks, _ in removed:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in removed:
            _replace_content(hooks, content)


_PLAIN_TYPES: Final = (str, bytes, int, float, complex, NoneType)


def is_user_object(value: Any) -> bool:
    """Return whether an object has a ``__dict__``, and a class not of Python, PyTorch or NumPy.

    Instances of `UserDict` and `UserList` count; functions, classes and Python modules do not.
    """
    if isinstance(value, UserDict | UserList):
        return True
    if not hasattr(value, "__dict__") or isinstance(value, type | ModuleType):
        return False
    library = type(value).__module__.partition(".")[0]
    return library not in sys.stdlib_module_names and library not in ("torch", "numpy")


class AssignedBuffers:
    """Finds buffers that the forward pass assigns instead of changing them in place.

    A capture does not record such an assignment. Therefore the new value of a registered buffer is
    copied into its tensor at the end of the forward pass. The pass itself reads a copy, because the
    backward pass needs the old value. `name` is that of the step in messages.
    """

    def __init__(self, model: torch.nn.Module, *, name: str) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._name = name
        self._assigned_buffers: set[tuple[str, str]] = set()
        """(path of the module, name) of each buffer that a forward pass has assigned."""
        self._registered_buffers: frozenset[tuple[str, str]] = frozenset()

    def register_assigned(self) -> None:
        """Register buffers that forward assigned, to copy them; refuse one that shares memory."""
        buffers = self._current_buffers()
        for path, key in sorted(self._assigned_buffers):
            for other_path, buffer in buffers.items():
                if other_path != (path, key) and storage_key(buffer) == storage_key(
                    buffers[path, key]
                ):
                    error = (
                        "is assigned in forward, which would make two buffers of one; use "
                        "copy_(...), or separate tensors: it shares its memory with "
                        + format_path(".".join(other_path))
                    )
                    raise CaptureError(self._format_error(path, key, error))
        self._registered_buffers = self._registered_buffers.union(self._assigned_buffers)

    def registered(self) -> list[tuple[torch.nn.Module, str]]:
        """Return (module, name) of each registered buffer."""
        return [(self._modules[path], key) for path, key in sorted(self._registered_buffers)]

    @contextmanager
    def track_pass(self) -> Iterator[None]:
        """Context manager around a forward pass: records which buffers the pass assigns.

        Registered buffers are copies during the pass; then their new values are copied into the old
        tensors, which return also after an error. Other buffers retain the assigned tensors.
        """
        old_buffers = self._current_buffers()
        parameters = self._current_parameters()
        copied_buffers = self._registered_buffers & old_buffers.keys()
        for path, key in copied_buffers:
            self._set_buffer(path, key, old_buffers[path, key].detach().clone())
        try:
            yield
            self._check_parameters(parameters)
            new_buffers = self._current_buffers()
            for path, key in sorted(new_buffers.keys() - old_buffers.keys()):
                error = "is new after forward; register it, with a tensor, in __init__"
                raise CaptureError(self._format_error(path, key, error))
            for (path, key), buffer in old_buffers.items():
                if new_buffers.get((path, key)) is buffer:
                    continue
                self._assigned_buffers.add((path, key))
                self._check_new_value(path, key, buffer, new_buffers.get((path, key)))
                if (path, key) in copied_buffers:
                    with torch.no_grad():
                        buffer.copy_(new_buffers[path, key])
        finally:
            for path, key in copied_buffers:
                self._set_buffer(path, key, old_buffers[path, key])

    def _current_parameters(self) -> Mapping[tuple[str, str], tuple[torch.Tensor, int]]:
        """Return (tensor, number of gradient hooks) of each parameter, by (module path, name)."""
        return {
            (path, key): (tensor, sum(len(getattr(tensor, name) or ()) for name in _TENSOR_HOOKS))
            for path, module in self._model.named_modules()
            for key, tensor in module._parameters.items()  # noqa: SLF001 - shared ones count twice
            if tensor is not None
        }

    def _check_parameters(
        self, old_parameters: Mapping[tuple[str, str], tuple[torch.Tensor, int]]
    ) -> None:
        """Raise `CaptureError` if parameters, or their numbers of gradient hooks, have changed."""
        new_parameters = self._current_parameters()
        for path, key in sorted(old_parameters.keys() | new_parameters.keys()):
            (old_tensor, n_old_hooks), (new_tensor, n_new_hooks) = (
                values.get((path, key), (None, 0)) for values in (old_parameters, new_parameters)
            )
            if old_tensor is not new_tensor or n_old_hooks != n_new_hooks:
                error = (
                    "is created, assigned, removed or given a hook in forward, which a compiled "
                    "step does not do; do so in __init__, or call the model once on inputs before"
                )
                raise CaptureError(self._format_error(path, key, error, kind="parameter"))

    def _current_buffers(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Return each buffer by (module path, name), one with two names twice."""
        return {
            (path, key): buffer
            for path, module in self._model.named_modules()
            for key, buffer in module._buffers.items()  # noqa: SLF001 - shared ones count twice
            if buffer is not None
        }

    def _set_buffer(self, path: str, key: str, value: torch.Tensor) -> None:
        self._modules[path]._buffers[key] = value  # noqa: SLF001 - bypasses redefined setters

    def _check_new_value(
        self, path: str, key: str, old_tensor: torch.Tensor, new_tensor: torch.Tensor | None
    ) -> None:
        """Refuse a new value that is None, of another shape or dtype, or requires a gradient."""
        if new_tensor is None:
            error = "is removed in forward; retain it, and change its values"
        elif new_tensor.shape != old_tensor.shape or new_tensor.dtype != old_tensor.dtype:
            error = (
                f"was {_type_and_shape(old_tensor)} and is assigned {_type_and_shape(new_tensor)} "
                f"in forward; assign the same shape and type, or use self.{key}.copy_(...)"
            )
        elif new_tensor.requires_grad:
            error = (
                "is assigned a value that depends on parameters, and would retain the graph of the "
                f"step; assign it with .detach(), or use self.{key}.copy_(...)"
            )
        else:
            return
        raise CaptureError(self._format_error(path, key, error))

    def _format_error(self, path: str, key: str, error: str, *, kind: str = "buffer") -> str:
        """Return an error message of a buffer or parameter; `error` begins with a verb."""
        module_text = f" of module {format_path(path)!r}" if format_path(path) else ""
        return f"{self._name}: {kind} {key!r}{module_text} {error}"


def _type_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _copy_content(value: Any) -> Any:
    """Return a shallow copy of a dict, or a list of the items of any other container."""
    return dict(value) if isinstance(value, dict) else list(value)


def _has_same_objects(content_a: Any, content_b: Any) -> bool:
    """Return whether two dicts, or two other containers, have identical objects in equal order."""
    if isinstance(content_a, dict):
        content_a, content_b = (*content_a, *content_a.values()), (*content_b, *content_b.values())
    return list(map(id, content_a)) == list(map(id, content_b))


def _replace_content(value: Any, content: Any) -> None:
    """Replace the content of a dict, set, list or deque in place."""
    value.clear()
    if isinstance(value, dict | set):
        value.update(content)
    else:
        value.extend(content)


@dataclass(frozen=True, slots=True)
class _Generator:
    """A random generator that is not PyTorch's."""

    description: str
    """Name for messages."""
    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]


class GeneratorStates:
    """Restores random generators of Python and NumPy, global and in modules; detects draws."""

    def __init__(self, name: str, snapshot: ModuleSnapshot) -> None:
        self._name = name
        self._generators = tuple(filter(_is_restorable, _find_generators(snapshot)))
        self._old_states = [_to_comparable(generator.get_state()) for generator in self._generators]

    @contextmanager
    def restore_at_end(self) -> Iterator[None]:
        """Context manager that restores, at its end, the states at its beginning."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                if _to_comparable(generator.get_state()) != _to_comparable(state):
                    generator.set_state(state)

    def drawn(self) -> str:
        """Return the first generator that has drawn, for messages; "" if none has."""
        for generator, old_state in zip(self._generators, self._old_states, strict=True):
            if _to_comparable(generator.get_state()) != old_state:
                return generator.description
        return ""


def _is_restorable(generator: _Generator) -> bool:
    """Return whether a generator has a state; the generator of the operating system has none."""
    try:
        generator.get_state()
    except FOREIGN_ERRORS:
        return False
    return True


def _find_generators(snapshot: ModuleSnapshot) -> Iterator[_Generator]:
    """Yield the generators of Python, then of NumPy: the global one, then those in a snapshot."""
    yield _Generator("Python's random", random.getstate, random.setstate)
    for generator in {
        id(python_generator): python_generator
        for python_generator in snapshot.instances_of((random.Random,))
    }.values():
        yield _Generator("a random.Random", generator.getstate, generator.setstate)
    yield _Generator("numpy.random", np.random.get_state, np.random.set_state)
    for generator in snapshot.instances_of((np.random.RandomState,)):
        yield _Generator("a numpy.random.RandomState", generator.get_state, generator.set_state)
    for generator in snapshot.instances_of((np.random.Generator, np.random.BitGenerator)):
        bit_generator = getattr(generator, "bit_generator", generator)
        yield _Generator(
            "a generator of numpy.random",
            partial(getattr, bit_generator, "state"),
            partial(setattr, bit_generator, "state"),
        )


_MIN_UNCONVERTED_LENGTH: Final = 16
"""Tuples of at least this length contain only numbers, and are compared without conversion."""


def _to_comparable(state: Any) -> Any:
    """Return a state with arrays converted to bytes, which ``==`` compares."""
    if isinstance(state, dict):
        return {key: _to_comparable(value) for key, value in state.items()}
    if isinstance(state, tuple) and len(state) < _MIN_UNCONVERTED_LENGTH:
        return tuple(map(_to_comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state
