"""Objects that a module's forward pass sets, draws or leaves behind: restored, removed or refused.

A table that a function keeps (``functools.lru_cache``, a dictionary, a name of a Python module)
would hold a tensor of the capture, which is no number: eager PyTorch fails that reads it later.
"""

from __future__ import annotations

import gc
import random
import sys
import traceback
from collections import UserDict, UserList, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from poetmodel.torch.capturing.joint_graph import shown_path
from poetmodel.torch.errors import RAISED, CaptureError, exception_chain
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class Attributes:
    """All that the modules of a step hold, as it is now, to be put back after they have run.

    Attributes, hooks, submodules, parameters, buffers and modes; what is in the containers and the
    objects of a user's classes that a module reaches; flags and hooks of its tensors; hooks of all
    modules; classes of modules, which parametrizations change. The values that tensors have while a
    step is captured are no numbers: whoever read them later would get an error of PyTorch.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._classes = [(module, type(module)) for module in self._modules.values()]
        self._tensors = [_Flags(tensor) for tensor in (*model.parameters(), *model.buffers())]
        self._seen = {id(module) for module in self._modules.values()}
        everywhere = vars(torch.nn.modules.module).items()
        hooks = [value for name, value in everywhere if name.startswith("_global_")]
        self._owners: dict[int, Any] = {}
        """The object or module that a dict has the attributes of, by the identity of the dict."""
        self._held = [_Held("", "", value) for value in hooks if isinstance(value, dict)]
        self._everywhere = len(self._held)
        for path, module in self._modules.items():
            self._held += self._reached(path, module)
        self._first = True
        """Whether no forward pass of the capture has begun yet."""

    def _reached(self, path: str, module: torch.nn.Module) -> Iterator[_Held]:
        """Yield the attributes of a module, and the containers and objects behind them."""
        seen = self._seen  # what several modules reach is kept once
        attributes = vars(module)
        self._owners[id(attributes)] = module
        yield _Held(path, "", attributes)
        pending: list[tuple[str, Any]] = list(attributes.items())
        while pending:
            key, value = pending.pop()
            if isinstance(value, (*_PLAIN, torch.Tensor)) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.nn.Module) or is_of_a_user(value):
                owner, value = value, vars(value)
                self._owners[id(value)] = owner
            if isinstance(value, list | dict | set | deque):
                yield _Held(path, key, value)
            elif not isinstance(value, tuple):
                continue
            items = value.values() if isinstance(value, dict) else value
            pending += [(key, item) for item in items if not isinstance(item, _PLAIN)]

    def reached(self, kinds: tuple[type, ...]) -> Iterator[Any]:
        """Yield the objects of some types that modules reach."""
        for held in self._held:
            for value in held.values():
                if isinstance(value, kinds):
                    yield value

    def contents(self) -> Iterator[tuple[str, str, Any, Any, bool]]:
        """Yield module, attribute, holder and content before of all dicts, lists and sets.

        Last, whether the holder is an object whose attributes are meant; for a module itself, the
        attribute is empty.
        """
        for held in self._held[self._everywhere :]:
            owner = self._owners.get(id(held.value))
            holder = held.value if owner is None else owner
            yield held.path, held.key, holder, held.before, owner is not None

    def modules(self) -> Iterable[torch.nn.Module]:
        """Return the modules."""
        return self._modules.values()

    def are_as_before(self) -> bool:
        """Whether there is nothing to put back."""
        return (
            all(type(module) is kind for module, kind in self._classes)
            and all(flags.is_as_before() for flags in self._tensors)
            and all(held.is_as_before() for held in self._held)
        )

    def put_back(self, *, within: bool = False) -> tuple[tuple[str, str], ...]:
        """Put everything back; return path and attribute of the tensors that had been set.

        `within` says that a forward pass of a capture begins, which has put parameters, buffers and
        hooks of its own in place: what is there at the first of them is there at the next ones.
        """
        begins = within and self._first
        self._first = not within
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for flags in self._tensors:
            flags.put_back()
        changed: list[tuple[str, str, Any]] = []
        for held in self._held:
            if begins:
                held.begin()
            changed += held.put_back(within=within)
        tensors = {(path, key) for path, key, value in changed if tensors_in(value)}
        return tuple(
            sorted(
                (path, key)
                for path, key in tensors
                if key not in OWN_ATTRIBUTES and not self._is_derived(path, key)
            )
        )

    def _is_derived(self, path: str, key: str) -> bool:
        """Whether an attribute is made of parameters, as ``weight_norm`` and RNNs do."""
        hooks = self._modules[path]._forward_pre_hooks.values()  # noqa: SLF001 - no other way
        return key == "_flat_weights" or any(getattr(hook, "name", None) == key for hook in hooks)


class _Held:
    """A container, which may be the attributes of an object, and what it held."""

    def __init__(self, path: str, key: str, value: Any) -> None:
        self.path, self.key, self.value = path, key, value
        self.before = self._begun = content_copy(value)

    def values(self) -> Iterable[Any]:
        """Return the previous content."""
        return self.before.values() if isinstance(self.before, dict) else self.before

    def is_as_before(self) -> bool:
        """Whether it holds what it held."""
        return _same(content_copy(self.value), self.before)

    def begin(self) -> None:
        """Note what a capture has put into it, where that is something that every module has."""
        if self.key in OWN_ATTRIBUTES:
            self._begun = content_copy(self.value)

    def put_back(self, *, within: bool) -> list[tuple[str, str, Any]]:
        """Put back what changed; return path, attribute and what was there meanwhile."""
        if within and self.key in _SWAPPED:
            return []
        if not within:
            self._begun = self.before
        content = self._begun
        current = content_copy(self.value)
        if _same(current, content):
            return []
        if self.key:
            fill(self.value, content)
            return [(self.path, self.key, current)]
        keys = [
            key
            for key in current.keys() | content.keys()
            if current.get(key, _ABSENT) is not content.get(key, _ABSENT)
        ]
        for key in keys:
            if key in content:
                self.value[key] = content[key]
            else:
                del self.value[key]
        return [(self.path, key, current.get(key)) for key in keys]


class _Flags:
    """Properties of a module's tensor beside its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._trained = tensor.requires_grad
        self._attributes = dict(vars(tensor))
        self._hooks = {name: dict(getattr(tensor, name) or {}) for name in _TENSOR_HOOKS}
        self._unhooked = {name for name in _TENSOR_HOOKS if getattr(tensor, name) is None}

    def is_as_before(self) -> bool:
        """Whether flags, hooks and attributes are those of before."""
        tensor = self._tensor
        hooks = all(
            _same(dict(getattr(tensor, name) or {}), before) for name, before in self._hooks.items()
        )
        trained = tensor.requires_grad == self._trained
        return trained and hooks and _same(vars(tensor), self._attributes)

    def put_back(self) -> None:
        """Put it back."""
        tensor = self._tensor
        if tensor.requires_grad != self._trained and tensor.is_leaf:
            tensor.requires_grad_(self._trained)
        for name, hooks in self._hooks.items():
            current = getattr(tensor, name)
            if current is not None and name in self._unhooked:
                setattr(tensor, name, None)
            elif current is not None and not _same(dict(current), hooks):
                fill(current, hooks)
        if not _same(vars(tensor), self._attributes):
            fill(vars(tensor), self._attributes)


_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PLAIN: Final = (str, bytes, int, float, complex, NoneType)
_ABSENT: Final = object()
OWN_ATTRIBUTES: Final = frozenset(vars(torch.nn.Module()))
"""Names of what every module has: parameters, buffers, hooks, submodules, mode."""
_SWAPPED: Final = ("_parameters", "_buffers")
"""Containers for a capture's own tensors."""


def is_of_a_user(value: Any) -> bool:
    """Whether attributes of an object are a user's: not those of a library's machinery."""
    if isinstance(value, UserDict | UserList):
        return True
    if not hasattr(value, "__dict__") or isinstance(value, type | ModuleType):
        return False
    library = type(value).__module__.partition(".")[0]
    return library not in sys.stdlib_module_names and library not in ("torch", "numpy")


class AssignedBuffers:
    """Buffers that the forward pass assigns, in place of changing them in place.

    A capture sees what happens to the tensor that a buffer is, and nothing of another tensor that
    is put in its stead. So the new value is copied into the buffer at the end of the forward pass.
    What the pass has read is a copy of the buffer: the backward pass needs it as it was.
    """

    def __init__(self, model: torch.nn.Module, *, name: str) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._name = name
        self._assigned: set[tuple[str, str]] = set()
        self._known: frozenset[tuple[str, str]] = frozenset()
        self.at_start: Callable[[], object] | None = None
        """Functions to call before each forward pass."""

    def learn(self) -> bool:
        """Copy what was found to be assigned from now on; return whether that is anything new.

        Raises `CaptureError` if such a buffer shares its memory with another.
        """
        new = not self._known.issuperset(self._assigned)
        buffers = self._buffers()
        for path, key in sorted(self._assigned):
            for other, buffer in buffers.items():
                if other != (path, key) and storage_key(buffer) == storage_key(buffers[path, key]):
                    fault = (
                        "is assigned in forward, which would make two buffers of one; use "
                        "copy_(...), or give each a tensor of its own: it shares its memory with "
                        + shown_path(".".join(other))
                    )
                    raise CaptureError(self._describe(path, key, fault))
        self._known = self._known.union(self._assigned)
        return new

    @contextmanager
    def around(self) -> Iterator[None]:
        """Note what a forward pass assigns; give the buffers that are known their new values.

        Raises `CaptureError` if what is assigned is of another shape or type, or has a gradient.
        """
        if self.at_start is not None:
            self.at_start()
        before = self._buffers()
        parameters = self._parameters()
        copied = self._known & before.keys()
        for path, key in copied:
            self._set(path, key, before[path, key].detach().clone())
        try:
            yield
            self._check_parameters(parameters)
            after = self._buffers()
            for path, key in sorted(after.keys() - before.keys()):
                fault = "is new after forward; register it, with a tensor, in __init__"
                raise CaptureError(self._describe(path, key, fault))
            for (path, key), buffer in before.items():
                if after.get((path, key)) is buffer:
                    continue
                self._assigned.add((path, key))
                self._check(path, key, buffer, after.get((path, key)))
                if (path, key) in copied:
                    with torch.no_grad():
                        buffer.copy_(after[path, key])
        finally:
            for path, key in copied:
                self._set(path, key, before[path, key])

    def _parameters(self) -> Mapping[tuple[str, str], tuple[torch.Tensor, int]]:
        """Return all parameters, also of new modules, with how many hooks each has."""
        return {
            (path, key): (tensor, sum(len(getattr(tensor, n) or ()) for n in _TENSOR_HOOKS))
            for path, module in self._model.named_modules()
            for key, tensor in module._parameters.items()  # noqa: SLF001 - shared ones count twice
            if tensor is not None
        }

    def _check_parameters(self, before: Mapping[tuple[str, str], tuple[torch.Tensor, int]]) -> None:
        """Raise where a forward pass adds, takes away or replaces a parameter, or hooks one."""
        after = self._parameters()
        for path, key in sorted(before.keys() | after.keys()):
            (old, hooks), (new, others) = (
                each.get((path, key), (None, 0)) for each in (before, after)
            )
            if old is not new or hooks != others:
                fault = (
                    "is made, assigned, taken away or given a hook in forward, which a compiled "
                    "step does not do; do so in __init__, or call the model once on inputs before"
                )
                raise CaptureError(self._describe(path, key, fault, kind="parameter"))

    def _buffers(self) -> Mapping[tuple[str, str], torch.Tensor]:
        return {
            (path, key): buffer
            for path, module in self._modules.items()
            for key, buffer in module._buffers.items()  # noqa: SLF001 - shared ones count twice
            if buffer is not None
        }

    def _set(self, path: str, key: str, value: torch.Tensor) -> None:
        self._modules[path]._buffers[key] = value  # noqa: SLF001 - past what modules redefine

    def _check(self, path: str, key: str, old: torch.Tensor, new: torch.Tensor | None) -> None:
        if new is None:
            fault = "is taken away in forward; leave it there, and change its values"
        elif new.shape != old.shape or new.dtype != old.dtype:
            fault = (
                f"was {_form(old)} and is assigned {_form(new)} in forward; assign the same form, "
                f"or use self.{key}.copy_(...)"
            )
        elif new.requires_grad:
            fault = (
                "is assigned a value that depends on parameters, and would keep the graph of the "
                f"step; assign it with .detach(), or use self.{key}.copy_(...)"
            )
        else:
            return
        raise CaptureError(self._describe(path, key, fault))

    def _describe(self, path: str, key: str, fault: str, *, kind: str = "buffer") -> str:
        at = f" of module {shown_path(path)!r}" if shown_path(path) else ""
        return f"{self._name}: {kind} {key!r}{at} {fault}"


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def content_copy(value: Any) -> Any:
    """Return a copy of a container's content: a dict, or a list."""
    return dict(value) if isinstance(value, dict) else list(value)


def _same(first: Any, second: Any) -> bool:
    """Whether two contents are the very same objects, in the same order."""
    if isinstance(first, dict):
        first, second = (*first, *first.values()), (*second, *second.values())
    return list(map(id, first)) == list(map(id, second))


def fill(value: Any, content: Any) -> None:
    """Let a container hold what is given, and nothing else."""
    value.clear()
    if isinstance(value, dict | set):
        value.update(content)
    else:
        value.extend(content)


@dataclass(frozen=True, slots=True)
class _Source:
    """A random generator that is not PyTorch's."""

    words: str
    state: Callable[[], Any]
    set_state: Callable[[Any], object]


class Draws:
    """Notices draws from ``random`` and ``numpy.random``, and from generators that modules hold."""

    def __init__(self, name: str, attributes: Attributes) -> None:
        self._name = name
        self._sources = tuple(filter(_has_state, _sources(attributes)))
        self._before = [_comparable(source.state()) for source in self._sources]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the states back at the end."""
        states = [source.state() for source in self._sources]
        try:
            yield
        finally:
            for source, state in zip(self._sources, states, strict=True):
                if _comparable(source.state()) != _comparable(state):
                    source.set_state(state)

    def check(self, trail: Sequence[str] = ()) -> None:
        """Raise `CaptureError` if a state is not what it was, and name the innermost module."""
        for source, before in zip(self._sources, self._before, strict=True):
            if _comparable(source.state()) != before:
                where = f" in {trail[-1]}" if trail else ""
                raise CaptureError(
                    f"{self._name}: forward draws from {source.words}{where}, and a compiled step "
                    "would repeat what was drawn when it was captured; draw with PyTorch "
                    "(torch.rand, ...), or outside of the step and give it as an input"
                )


def _has_state(source: _Source) -> bool:
    """Whether a generator can be put back: one of the operating system has no state."""
    try:
        source.state()
    except RAISED:
        return False
    return True


def _sources(attributes: Attributes) -> Iterator[_Source]:
    yield _Source("Python's random", random.getstate, random.setstate)
    for generator in {id(own): own for own in attributes.reached((random.Random,))}.values():
        yield _Source("a random.Random", generator.getstate, generator.setstate)
    yield _Source("numpy.random", np.random.get_state, np.random.set_state)
    for generator in attributes.reached((np.random.RandomState,)):
        yield _Source("a numpy.random.RandomState", generator.get_state, generator.set_state)
    for generator in attributes.reached((np.random.Generator, np.random.BitGenerator)):
        bits = getattr(generator, "bit_generator", generator)
        yield _Source(
            "a generator of numpy.random",
            partial(getattr, bits, "state"),
            partial(setattr, bits, "state"),
        )


_LONG: Final = 16
"""Tuples of so many numbers are compared as they are."""


def _comparable(state: Any) -> Any:
    """Return a state as something that can be compared; arrays as bytes."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple) and len(state) < _LONG:
        return tuple(map(_comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


# -- what the code keeps outside of its modules ------------------------------------------------

_Cached: Final = type(lru_cache(lambda: None))
_LEVELS: Final = 4
"""How deep in tuples a tensor is looked for."""


class Leftovers:
    """Tensors of a capture that outlive it, and what the names of Python's modules were before."""

    def __init__(self) -> None:
        modules = [module for module in list(sys.modules.values()) if type(module) is ModuleType]
        self._names = {id(vars(module)): dict(vars(module)) for module in modules}
        """Names of each Python module, by the identity of their dictionary."""
        self._collections = _old_collections()
        self._known: list[Callable[[], object]] = []
        """Functions that empty all known holders of tensors."""
        self.kept_by: set[str] = set()
        """The names and keys that held such tensors the last time."""

    def learn(self, error: BaseException) -> bool:
        """Take away what a failed capture has left; return whether it should be tried again.

        PyTorch runs the model several times, and fails where the code keeps what the first run
        made: so from now on `forget` takes it away before the next run.
        """
        for link in exception_chain(error):
            traceback.clear_frames(link.__traceback__)  # their variables are kept by no code
        gc.collect()  # nor is what only holds itself
        removals = self.take_away()
        new = bool(removals) and not self._known
        self._known += removals
        return new

    def forget(self) -> None:
        """Empty all that is known to keep tensors of a forward pass."""
        for empty in self._known:
            empty()

    def take_away(self) -> list[Callable[[], object]]:
        """Take tensors of a capture from all that keeps them; return what does it again."""
        self.kept_by.clear()
        level: Sequence[Any] = [value for value in self._young() if type(value) is FunctionalTensor]
        removals: list[Callable[[], object]] = []
        for _ in range(_LEVELS):
            if level:
                more, level = self._holders(level)
                removals += more
        for empty in removals:
            empty()
        return removals

    def _holders(self, kept: Sequence[Any]) -> tuple[list[Callable[[], object]], Sequence[Any]]:
        """Return functions that empty holders of some objects, and holders that stay full."""
        ids = set(map(id, kept))
        holders = [holder for holder in gc.get_referrers(*kept) if holder is not kept]
        removals = [empty for holder in holders for empty in self._removals(holder, ids)]
        return removals, [holder for holder in holders if isinstance(holder, tuple | frozenset)]

    def _young(self) -> Sequence[Any]:
        """Return the objects that may have been made since."""
        if sys.version_info >= (3, 14) or _old_collections() != self._collections:
            return gc.get_objects()
        return gc.get_objects(generation=0) + gc.get_objects(generation=1)

    def _removals(self, holder: Any, ids: set[int]) -> Iterator[Callable[[], object]]:
        """Yield what takes objects out of what holds them."""
        if isinstance(holder, _Cached):
            yield holder.cache_clear
        elif isinstance(holder, dict):
            keys = [
                key
                for key, value in holder.items()
                # PyTorch's own tables, which the frames of a failure hold, have fake keys.
                if (id(value) in ids or id(key) in ids) and not isinstance(key, FakeTensor)
            ]
            yield from (self._removal(holder, key) for key in keys)
        elif isinstance(holder, list | set | deque):
            content = [value for value in holder if id(value) not in ids]
            yield partial(fill, holder, content)
        elif is_of_a_user(holder):
            for key in [key for key, value in vars(holder).items() if id(value) in ids]:
                self.kept_by.add(key)
                yield partial(setattr, holder, key, None)

    def _removal(self, holder: dict[Any, Any], key: Any) -> Callable[[], object]:
        """Return a function that removes a key; a module's name is restored, or None."""
        before = self._names.get(id(holder), {})
        owners = gc.get_referrers(holder)
        if not any(isinstance(owner, _Cached) for owner in owners):
            self.kept_by.add(str(key))
        if key in before:
            return partial(holder.__setitem__, key, before[key])
        for owner in owners:
            if isinstance(owner, type):
                return partial(setattr, owner, key, None)
            if not isinstance(owner, ModuleType) and getattr(owner, "__dict__", None) is holder:
                return partial(holder.__setitem__, key, None)
        return partial(holder.pop, key, None)


def _old_collections() -> int:
    """Return the number of full collections so far, after which surviving objects count as old."""
    return sum(int(generation["collections"]) for generation in gc.get_stats()[1:])
