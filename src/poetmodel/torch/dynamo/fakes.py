"""A model and its inputs without memory, so that a graph is captured that no machine here runs."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def capture(compiler: Callable[..., Any], model: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Have a back end compile what ``torch.compile`` captures of a call, on fake tensors.

    Tensors of the device ``meta`` count as those of the processor.
    """

    def fake(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(_like(value), requires_grad=value.requires_grad)
        return _like(value).requires_grad_(value.requires_grad)

    with FakeTensorMode(allow_non_fake_inputs=True):
        if isinstance(model, torch.nn.Module):
            tensors = (*model.parameters(), *model.buffers())
            model = deepcopy(model, {id(tensor): fake(tensor) for tensor in tensors})
        given = _pytree.tree_map_only(torch.Tensor, fake, tuple(inputs))
        captured = model

        def call(*arguments: Any) -> Any:
            return captured(*arguments)

        # A code object of its own: what Dynamo keeps of a function belongs to that.
        call.__code__ = call.__code__.replace()
        torch.compile(call, backend=compiler, fullgraph=True, dynamic=False)(*given)


def predicted(module: fx.GraphModule, _: object = None) -> Callable[[list[Any]], Any]:
    """Return a function that runs nothing of a graph, and returns tensors like its results."""
    (output,) = module.graph.find_nodes(op="output")

    def run(arguments: list[Any]) -> Any:
        arguments.clear()
        results = fx.node.map_arg(output.args[0], lambda node: node.meta.get("val"))
        return _pytree.tree_map_only(torch.Tensor, _like, results)

    run._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch asks for it
    return run


def _like(value: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu") if value.is_meta else value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
