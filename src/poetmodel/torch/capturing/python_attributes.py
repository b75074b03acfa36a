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

_PATCHED_STANDARD_MODULES: Final = ("argparse",)
"""Modules of the standard library whose objects contain a user's values."""
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""Flags of classes that Python code created, and of classes whose attributes cannot be set."""


class AttributeRecorder:
    """Reports attribute reads of instances of registered classes: `on_read(object, name, value)`.

    Patches ``__getattribute__``. A missing value is `ABSENT`; the reading code is two frames above.
    """

    def __init__(self, on_read: Callable[[Any, str, Any], None]) -> None:
        self._on_read = on_read
        self._classes: set[type] = {torch.nn.Module}
        self._recorded_by_class: dict[type, bool] = {}
        """Whether attribute reads of a class's instances are recorded, by class."""
        self._patched_classes: list[tuple[type, Any]] = []
        """(class, its old ``__getattribute__``, None if inherited) of each patched class."""
        self._is_active = False
        self.on_class: Callable[[type], object] = lambda _: None
        """Called with each registered class and its base classes, and by `RecordedPlaces` with each
        registered value that is a class."""

    @contextmanager
    def patch_classes(self) -> Iterator[None]:
        """Context manager that patches the registered classes, also those registered inside.

        At the end, also after an error, the classes get back their old ``__getattribute__``.
        """
        self._is_active = True
        for kind in list(self._classes):
            self._patch(kind)
        try:
            yield
        finally:
            self._is_active = False
            for kind, old_method in self._patched_classes:
                if old_method is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = old_method  # type: ignore[method-assign, unused-ignore]
            self._patched_classes.clear()

    def register(self, kind: type) -> bool:
        """Register a class to be patched; return whether reads of its instances are recorded."""
        is_recorded = self._recorded_by_class.get(kind)
        if is_recorded is None:
            patched_class = _class_to_patch(kind)
            for base in kind.__mro__:
                self.on_class(base)
            is_recorded = self._recorded_by_class[kind] = patched_class is not None
            if patched_class is not None and patched_class not in self._classes:
                self._classes.add(patched_class)
                if self._is_active:
                    self._patch(patched_class)
        return is_recorded

    def _patch(self, kind: type) -> None:
        """Patch a class, so that attribute reads of instances, also of subclasses, are reported.

        Has no effect if the metaclass forbids setting attributes.
        """
        read_attribute: Any = kind.__getattribute__

        def read_and_report(value: Any, name: str) -> Any:
            """Return an attribute or raise `AttributeError`; report it or `ABSENT` to `on_read`."""
            try:
                attribute = read_attribute(value, name)
            except AttributeError:
                self._on_read(value, name, ABSENT)
                raise
            self._on_read(value, name, attribute)
            return attribute

        old_method = vars(kind).get("__getattribute__")
        try:
            kind.__getattribute__ = read_and_report  # type: ignore[assignment, method-assign, unused-ignore]
        except (AttributeError, TypeError):  # a metaclass forbids setting attributes
            return
        self._patched_classes.append((kind, old_method))


def _class_to_patch(kind: type) -> type | None:
    """Return the base to patch so that reads are recorded; None for tensors and built-in types."""
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
        is_patchable = is_patchable or base.__module__ in _PATCHED_STANDARD_MODULES
        flags = base.__flags__
        if is_patchable and flags & _HEAP_TYPE and not flags & _IMMUTABLE_TYPE:
            patched_class = base
    return patched_class
