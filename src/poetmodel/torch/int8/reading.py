"""Convert modules of PT2E to quantized fronts."""

from __future__ import annotations

import copy

from torch import fx, nn

from poetmodel.torch.int8.reader import Reader, Training, is_quantizing


def is_converted(module: nn.Module) -> bool:
    """Return whether a module was converted by PT2E: its graph has quantizing nodes."""
    return isinstance(module, fx.GraphModule) and any(map(is_quantizing, module.graph.nodes))


def with_fronts(model: nn.Module) -> nn.Module:
    """Return a model in which quantized fronts replace all converted modules.

    The model is unchanged. Modules that contain a converted one are copied and share parameters and
    buffers with the originals.
    """
    return _replace_converted(model, "", {})


def _replace_converted(
    module: nn.Module, path: str, results: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Return a front, a copy of a module that contains one, or the module; cache in `results`."""
    if module not in results:
        results[module] = module  # if a module contains itself, the original stays
        if is_converted(module):
            results[module] = front = Reader(module, _front_label(path), Training()).convert()
            front.replaced_parameters = tuple(module.parameters())
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


def _front_label(path: str) -> str:
    return f"quantized front {path!r}" if path else "quantized front"
