"""The captured graph run node by node, with kernels that give what eager does.

A network repeats itself. Where a run only measures, the expensive operations of one form (operator,
shapes, strides, types, numbers) are computed once.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from operator import getitem
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch._ops import OpOverload

from poetmodel.errors import PoetModelError
from poetmodel.torch.capturing.joint_graph import in_module
from poetmodel.torch.errors import RAISED, CaptureError
from poetmodel.torch.graph.operators import is_counted, kernel_of
from poetmodel.torch.graph.tensors import call_key, fake, storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from poetmodel.torch.capturing.joint_graph import Joint
    from poetmodel.torch.graph.profiles import OpProfile, OpProfiler

    Execute = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def temporarily(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Set something inside, and set it as it was before at the end."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


# -- running -----------------------------------------------------------------------------------


def call(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the result of a node's operation on its arguments."""
    return kernel_of(node)(*arguments, **keywords)


def replay(joint: Joint, execute: Execute = call) -> None:
    """Run every operation once, in the order of the graph, on the inputs of the capture.

    `execute` gets each node with its arguments and returns its value. Values are let go after their
    last use. The state of the random generator is put back.
    """
    given = ((argument.node, joint.value(argument)) for argument in joint.arguments)
    env = {node: v.detach() if isinstance(v, torch.Tensor) else v for node, v in given}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _Interpreter(joint.graph_module, execute).run(initial_env=env, enable_io_processing=False)


class _Interpreter(fx.Interpreter):  # type: ignore[misc, unused-ignore]
    """Runs a graph with something of one's own in place of each operation."""

    def __init__(self, module: fx.GraphModule, execute: Execute) -> None:
        super().__init__(module)
        self._execute = execute
        self.extra_traceback = False  # errors say themselves where they are

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        return self._execute(n, *self.fetch_args_kwargs_from_env(n))


# -- each form of operation once ----------------------------------------------------------------


class RepeatedOps:
    """Executes the first of the expensive operations of a form, whose outputs stand for all others.

    Expensive are convolutions, matrix products, attention, and what makes large tensors: nearly
    all of the time of a step. Their times and workspaces do not depend on values. The outputs are
    of the right kind, but not those of the step, random numbers among them: `sampled` runs it in
    full where an operation fails on them.
    """

    def __init__(self, joint: Joint, execute: Execute) -> None:
        self._execute = execute
        self._forms = {
            node: call_key(
                node.target, *(fx.node.map_arg(a, fake) for a in (node.args, node.kwargs))
            )
            for node in joint.graph_module.graph.nodes
            if is_counted(node) or _is_large(node)
        }
        self._left = Counter(self._forms.values())
        """How many of each form are to come, by what the capture predicts."""
        self._first: dict[Hashable, tuple[fx.Node, Hashable, Any]] = {}
        """First of each form that is to come again, its true form, and its outputs."""
        self.like: dict[fx.Node, fx.Node] = {}
        """Operation whose outputs stand for those of each operation that was not executed."""

    def __call__(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the outputs of an operation, or those of one like it."""
        form = self._forms.get(node)
        if form is None:
            return self._execute(node, arguments, keywords)
        self._left[form] -= 1
        kept = self._first.get(form) if self._left[form] else self._first.pop(form, None)
        true = call_key(node.target, arguments, keywords)
        if kept is not None and kept[1] == true:
            self.like[node] = kept[0]
            return kept[2]
        value = self._execute(node, arguments, keywords)
        if self._left[form] and _is_new(value, (arguments, keywords)):
            self._first[form] = (node, true, value)
        return value


LARGE_BYTES: Final = 2**18
"""Outputs of so many bytes make an operation expensive [B]."""


def _is_large(node: fx.Node) -> bool:
    """Whether an operation of PyTorch makes large tensors, and no indices."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target.is_view:
        return False
    outputs = tensors_in(fake(node))
    kinds = {output.dtype for output in outputs}
    return sum(output.nbytes for output in outputs) >= LARGE_BYTES and all(
        kind.is_floating_point or kind == torch.bool for kind in kinds
    )


def sampled(joint: Joint, execute: Execute) -> Mapping[fx.Node, fx.Node]:
    """Run the step as `replay` does, with each form of expensive operation executed once.

    Returns for each operation that was not executed the one that stands for it.
    """
    sampler = RepeatedOps(joint, execute)
    try:
        replay(joint, sampler)
    except RAISED:
        if not sampler.like:
            raise
        replay(joint, execute)  # it may have failed on the outputs of others
        return {}
    return sampler.like


def _is_new(value: Any, inputs: Any) -> bool:
    """Whether outputs are on the processor, in memory that no input has."""
    there = {storage_key(tensor) for tensor in tensors_in(inputs)}
    outputs = tensors_in(value)
    return all(t.device.type == "cpu" and storage_key(t) not in there for t in outputs)


def profiles_on_inputs(joint: Joint, profiler: OpProfiler) -> dict[fx.Node, OpProfile]:
    """Return the profiles of the operations of a step, run once on the inputs of its capture.

    Raises
    ------
    CaptureError
        If an operation fails.
    """
    profiles: dict[fx.Node, OpProfile] = {}

    def execute(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            value, profile = profiler(node, arguments, keywords)
        except PoetModelError:
            raise
        except RAISED as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise CaptureError(
                f"{joint.name}: {node.target}{in_module(node)} fails on the example inputs "
                f"with {type(error).__name__}: {reason}; try one ordinary training step first"
            ) from error
        if node.target is not getitem:
            profiles[node] = profile
        return value

    like = sampled(joint, execute)
    return profiles | {node: profiles[first] for node, first in like.items() if first in profiles}
