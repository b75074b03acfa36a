"""Capture on tensors without memory, so that models larger than this machine can be planned."""

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
    """Call a back end with the graphs that ``torch.compile`` captures of a call on fake tensors.

    Tensors on the device ``meta`` count as CPU tensors.
    """

    def to_fake(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(_like(value), requires_grad=value.requires_grad)
        return _like(value).requires_grad_(value.requires_grad)

    with FakeTensorMode(allow_non_fake_inputs=True):
        if isinstance(model, torch.nn.Module):
            tensors = (*model.parameters(), *model.buffers())
            model = deepcopy(model, {id(tensor): to_fake(tensor) for tensor in tensors})
        fakes = _pytree.tree_map_only(torch.Tensor, to_fake, tuple(inputs))
        function = model

        def call(*arguments: Any) -> Any:
            return function(*arguments)

        # A code object of its own, because Dynamo caches graphs by the code object.
        call.__code__ = call.__code__.replace()
        torch.compile(call, backend=compiler, fullgraph=True, dynamic=False)(*fakes)


def fake_function(module: fx.GraphModule, _: object = None) -> Callable[[list[Any]], Any]:
    """Return a function that executes no node of a graph, and returns tensors like its results."""
    (output,) = module.graph.find_nodes(op="output")

    def run(arguments: list[Any]) -> Any:
        arguments.clear()
        results = fx.node.map_arg(output.args[0], lambda node: node.meta.get("val"))
        return _pytree.tree_map_only(torch.Tensor, _like, results)

    run._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch reads it
    return run


def _like(value: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu") if value.is_meta else value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
