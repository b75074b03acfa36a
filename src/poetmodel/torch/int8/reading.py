"""Convert modules of PT2E to quantized fronts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import fx, nn

from poetmodel.torch.int8.patterns import PATTERNS
from poetmodel.torch.int8.reader import Reader, Training, is_quantizing

if TYPE_CHECKING:
    from poetmodel.torch.int8.front import QuantizedFront


def is_converted(module: nn.Module) -> bool:
    """Return whether a module was converted by PT2E: its graph has quantizing nodes."""
    return isinstance(module, fx.GraphModule) and any(map(is_quantizing, module.graph.nodes))


def with_fronts(model: nn.Module) -> nn.Module:
    """Return a model in which quantized fronts replace all converted modules.

    The model itself is unchanged. Its modules that contain a converted module are copied, and share
    their parameters and buffers with the originals; all other modules are the same objects.

    Raises
    ------
    InputError
        If an operator in a converted module has no kernel; the message names it and its module.
    """
    return _replace_converted(model, "", {})


def _replace_converted(
    module: nn.Module, path: str, results: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Return a module, or a shallow copy in which fronts replace converted submodules.

    `results` has the result for each module visited so far; the function adds to it. `path` is
    the name of the module in messages.
    """
    if module not in results:
        results[module] = module  # a module that contains itself is not changed
        if is_converted(module):
            results[module] = front = convert_front(module, where=_front_label(path))
            front.stands_for = tuple(module.parameters())
            return front
        children = {
            name: _replace_converted(child, f"{path}.{name}" if path else name, results)
            for name, child in module._modules.items()  # noqa: SLF001
            if child is not None
        }
        if any(child is not module._modules[name] for name, child in children.items()):  # noqa: SLF001
            module_copy = copy.copy(module)
            module_copy._modules = {**module._modules, **children}  # noqa: SLF001
            results[module] = module_copy
    return results[module]


def convert_front(
    module: nn.Module, *, where: str = "quantized front", training: Training | None = None
) -> QuantizedFront:
    """Convert a PT2E module to a quantized front; `where` is its name in messages.

    With `training`, some of its layers train, and the result is a `QuantizedNetwork`. Raises
    `InputError` for an operator without a kernel; the message names it and its module.
    """
    return Reader(module, where, training or Training(frozenset()), PATTERNS).convert()


def check_operators(module: nn.Module, *, where: str, training: Training) -> None:
    """Raise `InputError` if a module prepared by PT2E has an operator without a kernel.

    Batch norms that PT2E has folded into convolutions no longer exist at this point; other batch
    norms are refused.
    """
    Reader(module, where, training, PATTERNS).check_operators()


def _front_label(path: str) -> str:
    return f"quantized front {path!r}" if path else "quantized front"
