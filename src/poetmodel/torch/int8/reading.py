"""Modules that PT2E has converted, as quantized fronts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import fx, nn

from poetmodel.torch.int8.patterns import READ
from poetmodel.torch.int8.reader import Reader, Training, is_quantizing

if TYPE_CHECKING:
    from poetmodel.torch.int8.front import QuantizedFront


def is_converted(module: nn.Module) -> bool:
    """Whether a module is one that PT2E has converted: it says what is quantized."""
    return isinstance(module, fx.GraphModule) and any(map(is_quantizing, module.graph.nodes))


def with_fronts(model: nn.Module) -> nn.Module:
    """Return a model in whose place of each converted module is a quantized front.

    The model itself stays as it is. Modules on the way to a converted one are copies that share
    their parameters and buffers with it; all other modules are the same.

    Raises
    ------
    InputError
        If a converted module has something that has no kernel: names it, and its module.
    """
    return _replaced(model, "", {})


def _replaced(module: nn.Module, path: str, seen: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in seen:
        seen[module] = module  # a module within itself is left as it is
        if is_converted(module):
            seen[module] = front = front_of(module, where=_shown(path))
            front.stands_for = tuple(module.parameters())
            return front
        children = {
            name: _replaced(child, f"{path}.{name}" if path else name, seen)
            for name, child in module._modules.items()  # noqa: SLF001
            if child is not None
        }
        if any(child is not module._modules[name] for name, child in children.items()):  # noqa: SLF001
            own = copy.copy(module)
            own._modules = {**module._modules, **children}  # noqa: SLF001
            seen[module] = own
    return seen[module]


def front_of(
    module: nn.Module, *, where: str = "quantized front", training: Training | None = None
) -> QuantizedFront:
    """Return the quantized front that a converted module is; `where` is its place, for errors.

    With `training` some of its layers train, and the result is a `QuantizedNetwork`.

    Raises `InputError` if it has something that has no kernel: names it, and its module.
    """
    return Reader(module, where, training or Training(frozenset()), READ).read()


def check_operators(module: nn.Module, *, where: str, training: Training) -> None:
    """Raise `InputError` if a module that PT2E has prepared has an operator without a kernel.

    Batch norms that PT2E has folded into convolutions are gone by then; others are refused.
    """
    Reader(module, where, training, READ).check_operators()


def _shown(path: str) -> str:
    return f"quantized front {path!r}" if path else "quantized front"
