"""Capture on fake tensors, to plan models that need more RAM than this machine has."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def capture_on_fakes(
    compiler: Callable[..., Any], model: Callable[..., Any], inputs: Sequence[Any]
) -> None:
    """Compile a call by back end `compiler`, and execute it on fakes; ``meta`` counts as CPU."""

    def to_fake(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(_allocate_fake(value), requires_grad=value.requires_grad)
        return _allocate_fake(value).requires_grad_(value.requires_grad)

    with FakeTensorMode(allow_non_fake_inputs=True):
        if isinstance(model, torch.nn.Module):
            tensors = (*model.parameters(), *model.buffers())
            model = deepcopy(model, {id(tensor): to_fake(tensor) for tensor in tensors})
        fake_inputs = _pytree.tree_map_only(torch.Tensor, to_fake, tuple(inputs))
        function = model

        def call_model(*arguments: Any) -> Any:
            return function(*arguments)

        # A new code object, because Dynamo caches graphs by the code object.
        call_model.__code__ = call_model.__code__.replace()
        torch.compile(call_model, backend=compiler, fullgraph=True, dynamic=False)(*fake_inputs)


def fake_function(module: fx.GraphModule, _: object = None) -> Callable[[list[Any]], Any]:
    """Return a boxed function that returns tensors like a graph's results, and executes no node."""
    (output,) = module.graph.find_nodes(op="output")

    def return_fakes(arguments: list[Any]) -> Any:
        arguments.clear()
        results = fx.node.map_arg(output.args[0], lambda node: node.meta.get("val"))
        return _pytree.tree_map_only(torch.Tensor, _allocate_fake, results)

    return_fakes._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch reads it
    return return_fakes


def _allocate_fake(value: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor with the layout of `value`, for a meta tensor on the CPU."""
    device = torch.device("cpu") if value.is_meta else value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
