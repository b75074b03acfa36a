"""Execution of the captured graph node by node, with results equal to eager mode bit by bit.

Networks repeat operations. If a replay only measures, expensive operations with equal call keys
(operator, shapes, strides, types, numbers) are executed once if they run on the CPU. Repetitions
then have the values of the first execution.
"""

from __future__ import annotations

from collections import Counter
from operator import getitem
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.errors import PoetModelError
from poetmodel.torch.capturing.front_private import OpOverload
from poetmodel.torch.capturing.joint_graph import location_suffix
from poetmodel.torch.errors import FOREIGN_ERRORS, CaptureError
from poetmodel.torch.graph.operators import has_flop_formula, kernel_of
from poetmodel.torch.graph.tensors import call_key, fake_value, storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from poetmodel.torch.capturing.joint_graph import Joint
    from poetmodel.torch.graph.profiles import OpProfile, OpProfiler

    Execute = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]
    """Called with an operation's node, arguments and keywords; returns the result."""


# -- execution ---------------------------------------------------------------------------------


def execute_kernel(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Execute a node's kernel on its arguments, and return the result."""
    return kernel_of(node)(*arguments, **keywords)


def replay(joint: Joint, execute: Execute = execute_kernel) -> None:
    """Execute each operation once, on the captured inputs; state and generator do not change."""
    values = ((argument.node, joint.value(argument)) for argument in joint.arguments)
    env = {
        node: value.detach() if isinstance(value, torch.Tensor) else value for node, value in values
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _Interpreter(joint.graph_module, execute).run(initial_env=env, enable_io_processing=False)


class _Interpreter(fx.Interpreter):  # type: ignore[misc, unused-ignore]
    """FX interpreter that calls `execute` for each operation."""

    def __init__(self, module: fx.GraphModule, execute: Execute) -> None:
        super().__init__(module)
        self._execute = execute
        self.extra_traceback = False  # our errors name the location

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        return self._execute(n, *self.fetch_args_kwargs_from_env(n))


# -- each call key once --------------------------------------------------------------------------


class DistinctOpExecutor:
    """Executes expensive operations once per call key; repetitions return the same outputs.

    Convolutions, matrix products, attention and large outputs of floats or booleans take nearly all
    of a step's time, and their times and workspaces do not depend on values. Outputs have the right
    shapes, but other values. Those not on the CPU, or in memory of inputs, are not reused.
    """

    def __init__(self, joint: Joint, execute: Execute) -> None:
        self._execute = execute
        self._keys = {
            node: call_key(
                node.target,
                *(fx.node.map_arg(argument, fake_value) for argument in (node.args, node.kwargs)),
            )
            for node in joint.graph_module.graph.nodes
            if has_flop_formula(node) or _is_large(node)
        }
        self._n_remaining = Counter(self._keys.values())
        """Number of operations that were not called yet, by predicted call key."""
        self._representatives: dict[Hashable, tuple[fx.Node, Hashable, Any]] = {}
        """(node, actual call key, outputs) of an executed operation, by predicted call key."""
        self.representative_of: dict[fx.Node, fx.Node] = {}
        """For each operation that was not executed, the operation whose outputs were used."""

    def __call__(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Execute an operation, or return the outputs of an executed one with the same call key.

        Call this once for each operation. A reused one has an entry in `representative_of`.
        """
        key = self._keys.get(node)
        if key is None:
            return self._execute(node, arguments, keywords)
        self._n_remaining[key] -= 1
        is_last = not self._n_remaining[key]
        representative = (
            self._representatives.pop(key, None) if is_last else self._representatives.get(key)
        )
        actual_key = call_key(node.target, arguments, keywords)
        if representative is not None and representative[1] == actual_key:
            self.representative_of[node] = representative[0]
            return representative[2]
        value = self._execute(node, arguments, keywords)
        if self._n_remaining[key] and _is_reusable(value, (arguments, keywords)):
            self._representatives[key] = (node, actual_key, value)
        return value


LARGE_BYTES: Final = 2**18
"""Outputs of at least this total size make an operation expensive [B]."""


def _is_large(node: fx.Node) -> bool:
    """Return whether an operator's outputs are `LARGE_BYTES` or more, all floats or booleans."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target.is_view:
        return False
    outputs = tensors_in(fake_value(node))
    dtypes = {output.dtype for output in outputs}
    return sum(output.nbytes for output in outputs) >= LARGE_BYTES and all(
        dtype.is_floating_point or dtype == torch.bool for dtype in dtypes
    )


def replay_distinct(joint: Joint, execute: Execute) -> Mapping[fx.Node, fx.Node]:
    """Replay a step like `replay`, but execute expensive operations once per call key.

    Returns, for each operation that was not executed, the operation whose outputs were used. If an
    operation fails on such outputs, all operations are executed from the start.
    """
    executor = DistinctOpExecutor(joint, execute)
    try:
        replay(joint, executor)
    except FOREIGN_ERRORS:
        if not executor.representative_of:
            raise
        replay(joint, execute)  # the failure may come from another operation's outputs
        return {}
    return executor.representative_of


def _is_reusable(value: Any, inputs: Any) -> bool:
    """Return whether later calls may return these outputs: on the CPU, not in inputs' memory."""
    input_keys = {storage_key(tensor) for tensor in tensors_in(inputs)}
    outputs = tensors_in(value)
    return all(
        output.device.type == "cpu" and storage_key(output) not in input_keys for output in outputs
    )


def profile_on_inputs(joint: Joint, profiler: OpProfiler) -> dict[fx.Node, OpProfile]:
    """Execute a step on the inputs of its capture; return a profile per node except ``getitem``."""
    profiles: dict[fx.Node, OpProfile] = {}

    def execute(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Execute a node, store its profile, except of ``getitem``, and return its output."""
        try:
            value, profile = profiler(node, arguments, keywords)
        except PoetModelError:
            raise
        except FOREIGN_ERRORS as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise CaptureError(
                f"{joint.name}: {node.target}{location_suffix(node)} fails on the example inputs "
                f"with {type(error).__name__}: {reason}; try one ordinary training step first"
            ) from error
        if node.target is not getitem:
            profiles[node] = profile
        return value

    executed_node_of = replay_distinct(joint, execute)
    return profiles | {
        node: profiles[executed_node]
        for node, executed_node in executed_node_of.items()
        if executed_node in profiles
    }
