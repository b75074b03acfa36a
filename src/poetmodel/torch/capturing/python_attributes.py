"""Recording of attribute reads: patches ``__getattribute__`` of classes during a forward pass."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.python_values import ABSENT, PLAIN, origin_of_module
from poetmodel.torch.errors import CodeOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PATCHED_STANDARD: Final = ("argparse",)
"""Modules of the standard library with objects that contain a user's values."""
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""Flags of a class: Python code created it; its attributes cannot be set."""


class AttributeRecorder:
    """Patches the classes of recorded objects, and removes the patches.

    Parameters
    ----------
    on_read : callable
        Called with the object, the name of the attribute and its value, or `ABSENT` if it has
        none. The caller of the callback's caller is the code that reads.
    """

    def __init__(self, on_read: Callable[[Any, str, Any], None]) -> None:
        """Register `torch.nn.Module`; `patches` patches classes later."""
        self._on_read = on_read
        self._classes: set[type] = {torch.nn.Module}
        self._is_recorded: dict[type, bool] = {}
        self._patched: list[tuple[type, Any]] = []
        self._is_active = False
        self.on_class: Callable[[type], object] = lambda _: None
        """Called with each class of recorded objects, and with each of its base classes."""

    @contextmanager
    def patches(self) -> Iterator[None]:
        """Context manager that patches all registered classes, also those registered later."""
        self._is_active = True
        for kind in list(self._classes):
            self._patch(kind)
        try:
            yield
        finally:
            self._is_active = False
            for kind, original in self._patched:
                if original is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = original  # type: ignore[method-assign, unused-ignore]
            self._patched.clear()

    def register(self, kind: type) -> bool:
        """Register a class; return whether attribute reads of its instances are recorded."""
        is_recorded = self._is_recorded.get(kind)
        if is_recorded is None:
            patched_class = _class_to_patch(kind)
            for base in kind.__mro__:
                self.on_class(base)
            is_recorded = self._is_recorded[kind] = patched_class is not None
            if patched_class is not None and patched_class not in self._classes:
                self._classes.add(patched_class)
                if self._is_active:
                    self._patch(patched_class)
        return is_recorded

    def _patch(self, kind: type) -> None:
        """Patch a class to record the attribute reads of its instances and of subclasses."""
        original: Any = kind.__getattribute__

        def recorded(value: Any, name: str) -> Any:
            """Return an attribute; report its value, or that it is absent, to `on_read`."""
            try:
                attribute = original(value, name)
            except AttributeError:
                self._on_read(value, name, ABSENT)
                raise
            self._on_read(value, name, attribute)
            return attribute

        own_method = vars(kind).get("__getattribute__")
        try:
            kind.__getattribute__ = recorded  # type: ignore[assignment, method-assign, unused-ignore]
        except (AttributeError, TypeError):  # a metaclass forbids it
            return
        self._patched.append((kind, own_method))


def _class_to_patch(kind: type) -> type | None:
    """Return the class to patch so that reads of all instances are recorded; None if impossible.

    It is the last class in the method resolution order that belongs to a user or a package. If a
    class before it has its own ``__getattribute__``, which may translate names, that method calls
    the patched one.
    """
    if issubclass(kind, torch.nn.Module):
        module: type = torch.nn.Module
        return module
    if issubclass(kind, (torch.Tensor, type, ModuleType, BaseException, *PLAIN)):
        return None
    patched_class = None
    for base in kind.__mro__:
        is_patchable = origin_of_module(base.__module__) in (
            CodeOrigin.USER,
            CodeOrigin.LIBRARY,
            CodeOrigin.GENERATED,
        )
        is_patchable = is_patchable or base.__module__ in _PATCHED_STANDARD
        flags = base.__flags__
        if is_patchable and flags & _HEAP_TYPE and not flags & _IMMUTABLE_TYPE:
            patched_class = base
    return patched_class
