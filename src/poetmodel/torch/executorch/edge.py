"""A module and its loss as ExecuTorch's edge program, and that as a file with addresses.

This is ExecuTorch's own way to training: ``torch.export``, ``_export_forward_backward``,
``to_edge``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir.dialects._ops import ops as edge_operators
from executorch.exir.emit import _emit_program
from executorch.exir.memory_planning import (
    MemoryAlgoResult,
    MemoryPlanningAlgorithmSuite,
    SpecAllocResult,
    greedy,
)
from executorch.exir.operator.convert import to_out_variant
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.program._program import _default_decomposition_table
from executorch.runtime import Runtime
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.export.experimental import _export_forward_backward
from torch.export.graph_signature import OutputKind
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.nn.attention import SDPBackend, sdpa_kernel

from poetmodel.clock import infrequent_gc
from poetmodel.errors import listed
from poetmodel.placement.lifetimes import Block, Span
from poetmodel.placement.placing import place_blocks
from poetmodel.plan.alignment import ALIGNMENT
from poetmodel.schedule.machine import BEFORE, Content
from poetmodel.torch.capturing.inputs import (
    find_loss,
    flatten,
    refuse,
    step_errors,
    takes_keywords,
    unflatten,
)
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.capturing.replay import temporary_setting
from poetmodel.torch.errors import CaptureError, explained, quiet
from poetmodel.torch.graph.tensors import fake_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executorch.exir import EdgeProgramManager
    from executorch.exir.tensor import TensorSpec
    from torch.export import ExportedProgram

    from poetmodel.torch.capturing.inputs import Inputs

_aten: Final = torch.ops.aten
_VIEW: Final = edge_operators.edge.aten.view_copy.default

_WRONG: Final = frozenset({_aten.max_pool2d_with_indices_backward.default})
"""Operators whose kernel is not to be used: it adds to whatever its output held before."""

_RESHAPES: Final = frozenset(
    (
        _aten.alias_copy.default,
        _aten.detach_copy.default,
        _aten.squeeze_copy.dim,
        _aten.squeeze_copy.dims,
        _aten.unsqueeze_copy.default,
        _aten.view_copy.default,
    )
)
"""Copies of an input with at most another shape. Of these ExecuTorch runs ``view_copy`` without a
copy, unless it is a result."""


def edge_program(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> EdgeProgramManager:
    """Return the edge program of a training step, for ExecuTorch's own kernels.

    Its inputs are the tensors among `inputs`, flat. Its results are new values of buffers, the
    loss, and the gradients of what is trained.

    Raises
    ------
    CaptureError
        If the step cannot be exported, or an operator has no kernel: names it.
    """
    refuse(name, step_errors(model, loss_fn, inputs))
    with quiet(), infrequent_gc(), explained(name), sdpa_kernel(SDPBackend.MATH):
        step, tensors = _with_loss(name, model, loss_fn, inputs)
        exported = torch.export.export(step, tensors, strict=False)
        edge = _edge(_export_forward_backward(exported))
    _check(name, edge.exported_program().graph)
    return edge


def _with_loss(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a module from the tensors among inputs to the loss, and these tensors.

    It is a copy of the model with another ``forward``, so that parameters keep their names.
    """
    flat, form = flatten(inputs)
    given = inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    by_name = takes_keywords(model, given)

    def forward(*tensors: torch.Tensor) -> Any:
        values = iter(tensors)
        filled = [next(values) if isinstance(v, torch.Tensor) else v for v in flat]
        batch = unflatten(filled, form)
        arguments = batch if loss_fn is None else batch[:-1]
        output = model(**arguments[0]) if by_name else model(*arguments)
        loss: torch.Tensor = find_loss(
            name, output if loss_fn is None else loss_fn(output, batch[-1])
        )
        return loss

    step = copy.copy(model)
    step.forward = forward
    vars(step).update(_forward_hooks={}, _forward_pre_hooks={})  # the model itself runs its own
    if isinstance(loss_fn, torch.nn.Module):
        vars(step)["_modules"] = {**model._modules, LOSS: loss_fn}  # noqa: SLF001 - of a copy
    return step, tuple(value for value in flat if isinstance(value, torch.Tensor))


def _edge(joint: ExportedProgram) -> EdgeProgramManager:
    """Return an edge program whose operators have kernels, as far as PyTorch takes others apart."""
    table = _default_decomposition_table()

    def learn(graph: fx.Graph) -> bool:
        calls = (operator_of(node) for node in graph.nodes)
        more = {
            operator: decomposition_table[operator]
            for operator in set(calls) & (decomposition_table.keys() - table.keys())
            if not _has_kernel(operator)
        }
        table.update(more)
        return bool(more)

    while True:
        while learn(joint.graph):
            joint = joint.run_decompositions(table)
        edge = to_edge(joint, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        if not learn(edge.exported_program().graph):
            return edge
        joint = joint.run_decompositions(table)


def _has_kernel(operator: Any) -> bool:
    """Whether ExecuTorch's portable kernels have an operator, and have it right.

    A view counts: it becomes a copy, of which that is asked again.
    """
    if not isinstance(operator, OpOverload) or operator.is_view:
        return True
    schema = operator._schema  # noqa: SLF001 - its only name
    overload = f"{schema.overload_name}_out".lstrip("_")
    try:
        schema = to_out_variant(operator)[0]._schema  # noqa: SLF001 - its only name
        overload = schema.overload_name
    except AssertionError:
        pass  # ExecuTorch cannot tell the overloads of ``pow`` apart; the name says it
    except RuntimeError:
        return False
    known = Runtime.get().operator_registry.operator_names
    return operator not in _WRONG and f"{schema.name}.{overload}" in known


def operator_of(node: fx.Node) -> Any:
    """Return the operator of PyTorch that a node of an edge program calls."""
    return getattr(node.target, "_op", node.target)


def _check(name: str, graph: fx.Graph) -> None:
    """Raise unless all operators of an edge program have kernels."""
    operators = dict.fromkeys(operator_of(node) for node in graph.nodes)
    absent = [str(operator) for operator in operators if not _has_kernel(operator)]
    if absent:
        raise CaptureError(
            f"{name}: ExecuTorch has no kernel for {listed(absent)}; use another layer there"
        )
    backward = torch.ops.aten.convolution_backward.default
    for node in graph.nodes:
        if operator_of(node) is backward and node.args[2].meta["val"].dim() != 4:  # noqa: PLR2004
            raise CaptureError(
                f"{name}: ExecuTorch's kernel for gradients of convolutions takes images alone; "
                "write a Conv1d as a Conv2d over images of height 1"
            )


class RemoveCopies(PassBase):  # type: ignore[misc, unused-ignore]
    """Leaves out copies that nobody needs: reshapes become views, two transpositions none.

    Results have the same bits.
    """

    def call(self, module: fx.GraphModule) -> PassResult:
        """Change the graph of a module."""
        for node in module.graph.nodes:
            operator = operator_of(node)
            if operator in _RESHAPES and fake_value(node).is_contiguous():
                node.target, node.kwargs = _VIEW, {}
                node.args = (node.args[0], list(fake_value(node).shape))
            elif operator is _aten.permute_copy.default:
                source, dims = node.args
                if operator_of(source) is operator and _undo(source.args[1], dims):
                    node.replace_all_uses_with(source.args[0])
        module.graph.eliminate_dead_code()
        module.recompile()
        return PassResult(module, modified=True)


def _undo(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether a permutation after another one puts dimensions where they were."""
    return [first[dim] % len(first) for dim in second] == list(range(len(first)))


def is_view(node: fx.Node) -> bool:
    """Whether a node of an edge program shows memory of another, without a copy."""
    return (
        node.target is _VIEW
        and fake_value(node).is_contiguous()
        and all(user.op != "output" for user in node.users)
    )


# -- the file, with a memory plan of ExecuTorch's or of ours ------------------------------------

PLACING_S: Final = 10.0
"""Most time to choose addresses [s]."""
METHOD: Final = "forward"
"""Name of the step in a file."""
_INDEX: Final = "__et_training_{}_index_"
"""The methods of a file that tell where its gradients and its parameters begin."""


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """Content of a program's file."""

    program: bytes
    greedy_bytes: int
    """The size of the arena with the addresses of ExecuTorch's greedy planner [B]."""

    @property
    def arena_bytes(self) -> int:
        """The size of the arena that the file asks for [B]."""
        program = deserialize_pte_binary(self.program).program
        (step,) = (plan for plan in program.execution_plan if plan.name == METHOD)
        return sum(step.non_const_buffer_sizes)


def lowered(edge: EdgeProgramManager, *, is_ours: bool) -> LoweredProgram:
    """Return a program with addresses that ExecuTorch chose, or that are ours."""
    placement = _Placement(is_ours=is_ours)
    suite = MemoryPlanningAlgorithmSuite([placement])
    planning = MemoryPlanningPass(suite, alignment=ALIGNMENT)
    before = _emit_program._get_training_metadata  # noqa: SLF001 - has no other name
    setter = lambda value: setattr(_emit_program, "_get_training_metadata", value)  # noqa: E731
    counted = lambda methods: _counted(before(methods), methods)  # noqa: E731
    with quiet(), infrequent_gc(), temporary_setting(setter, counted, before):
        # It changes what it makes a program of.
        program = copy.deepcopy(edge).to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=planning)
        )
    return LoweredProgram(program.buffer, placement.greedy_bytes)


def _counted(metadata: dict[str, Any], methods: Mapping[str, ExportedProgram]) -> dict[str, Any]:
    """Return the starts of gradients and of parameters among the outputs of a method.

    ExecuTorch 1.5.1 counts new values of buffers too, which no method returns.
    """
    kinds = {"gradients": OutputKind.GRADIENT_TO_PARAMETER, "parameters": OutputKind.TOKEN}
    for name, program in methods.items():
        specs = program.graph_signature.output_specs
        returned = [spec.kind for spec in specs if spec.kind != OutputKind.BUFFER_MUTATION]
        for what, kind in kinds.items():
            if kind in returned:
                metadata[_INDEX.format(what) + name] = returned.index(kind)
    return metadata


class _Placement:
    """Chooses addresses for what a program has in its arena."""

    __name__ = "poetmodel"

    def __init__(self, *, is_ours: bool) -> None:
        self._is_ours = is_ours
        self.greedy_bytes = 0

    def __call__(
        self, alignment: int, specs: Iterable[TensorSpec], *others: Any
    ) -> MemoryAlgoResult:
        """Return a number of a memory and an offset for each tensor."""
        placed = list(specs)
        result = greedy(alignment, placed, *others)
        self.greedy_bytes = sum(result.bufsizes)
        if not self._is_ours:
            return result
        length = 1 + max((spec.lifetime[1] for spec in placed), default=0)
        blocks = [_block(number, spec, length) for number, spec in enumerate(placed)]
        offsets, size, _ = place_blocks(blocks, length, time_limit=PLACING_S)
        numbered = enumerate(zip(placed, offsets, strict=True))
        chosen = {spec: SpecAllocResult(1, number, at) for number, (spec, at) in numbered}
        return MemoryAlgoResult(chosen, [0, size])


def _block(number: int, spec: TensorSpec, length: int) -> Block:
    begin, last = spec.lifetime
    position = BEFORE if begin == 0 and last + 1 == length else begin
    return Block(
        spans=[Span(begin, last + 1, spec.allocated_memory)],
        contents=[(position, Content.OUTPUT, number)],
    )
