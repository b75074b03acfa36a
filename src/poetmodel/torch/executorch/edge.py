"""A module and its loss as ExecuTorch's edge program, and that program as a file with offsets.

Follows ExecuTorch's own training path: ``torch.export``, ``_export_forward_backward``, ``to_edge``.
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
from poetmodel.torch.errors import CaptureError, convert_exceptions, suppress_warnings
from poetmodel.torch.graph.tensors import fake_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executorch.exir import EdgeProgramManager
    from executorch.exir.tensor import TensorSpec
    from torch.export import ExportedProgram

    from poetmodel.torch.capturing.inputs import Inputs

_aten: Final = torch.ops.aten
_VIEW: Final = edge_operators.edge.aten.view_copy.default

_BROKEN: Final = frozenset({_aten.max_pool2d_with_indices_backward.default})
"""Operators with a wrong kernel: it adds the result to the old content of its output."""

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
"""Copies that change at most the shape of an input. ExecuTorch executes only ``view_copy`` without
a copy, unless it is a result."""


def edge_program(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> EdgeProgramManager:
    """Return the edge program of a training step, for ExecuTorch's portable kernels.

    Its inputs are the tensors among `inputs`, flattened. Its results are the new values of buffers,
    the loss, and the gradients of trained parameters.

    Raises
    ------
    CaptureError
        If the step cannot be exported, or an operator has no kernel; the message names it.
    """
    refuse(name, step_errors(model, loss_fn, inputs))
    with (
        suppress_warnings(),
        infrequent_gc(),
        convert_exceptions(name),
        sdpa_kernel(SDPBackend.MATH),
    ):
        step, tensors = _with_loss(name, model, loss_fn, inputs)
        exported = torch.export.export(step, tensors, strict=False)
        edge = _to_edge(_export_forward_backward(exported))
    _check_kernels(name, edge.exported_program().graph)
    return edge


def _with_loss(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a module that computes the loss from the tensors among `inputs`, and these tensors.

    The module is a copy of the model with another ``forward``, so that parameters keep their names.
    """
    flat, structure = flatten(inputs)
    model_inputs = inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    by_keyword = takes_keywords(model, model_inputs)

    def forward(*tensors: torch.Tensor) -> Any:
        """Compute the loss from the tensors; the other inputs are constants."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(v, torch.Tensor) else v for v in flat]
        batch = unflatten(leaves, structure)
        arguments = batch if loss_fn is None else batch[:-1]
        output = model(**arguments[0]) if by_keyword else model(*arguments)
        loss: torch.Tensor = find_loss(
            name, output if loss_fn is None else loss_fn(output, batch[-1])
        )
        return loss

    step = copy.copy(model)
    step.forward = forward
    vars(step).update(_forward_hooks={}, _forward_pre_hooks={})  # calling the model runs its hooks
    if isinstance(loss_fn, torch.nn.Module):
        vars(step)["_modules"] = {**model._modules, LOSS: loss_fn}  # noqa: SLF001 - of a copy
    return step, tuple(value for value in flat if isinstance(value, torch.Tensor))


def _to_edge(joint: ExportedProgram) -> EdgeProgramManager:
    """Convert to an edge program, and decompose operators without a kernel where PyTorch can."""
    table = _default_decomposition_table()

    def add_decompositions(graph: fx.Graph) -> bool:
        """Add decompositions of operators without a kernel to the table.

        Returns whether any is new.
        """
        calls = (operator_of(node) for node in graph.nodes)
        missing = {
            operator: decomposition_table[operator]
            for operator in set(calls) & (decomposition_table.keys() - table.keys())
            if not _has_kernel(operator)
        }
        table.update(missing)
        return bool(missing)

    while True:
        while add_decompositions(joint.graph):
            joint = joint.run_decompositions(table)
        edge = to_edge(joint, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        if not add_decompositions(edge.exported_program().graph):
            return edge
        joint = joint.run_decompositions(table)


def _has_kernel(operator: Any) -> bool:
    """Return whether ExecuTorch's portable kernels implement an operator correctly.

    Views count as implemented: each later becomes a copy, whose operator is checked separately.
    """
    if not isinstance(operator, OpOverload) or operator.is_view:
        return True
    schema = operator._schema  # noqa: SLF001 - its only name
    overload = f"{schema.overload_name}_out".lstrip("_")
    try:
        schema = to_out_variant(operator)[0]._schema  # noqa: SLF001 - its only name
        overload = schema.overload_name
    except AssertionError:
        pass  # ExecuTorch fails to resolve the overloads of ``pow``; the schema names them
    except RuntimeError:
        return False
    registered_names = Runtime.get().operator_registry.operator_names
    return operator not in _BROKEN and f"{schema.name}.{overload}" in registered_names


def operator_of(node: fx.Node) -> Any:
    """Return PyTorch's operator for a node of an edge program."""
    return getattr(node.target, "_op", node.target)


def _check_kernels(name: str, graph: fx.Graph) -> None:
    """Raise `CaptureError` for operators without a kernel, and gradients of 1-D convolutions."""
    operators = dict.fromkeys(operator_of(node) for node in graph.nodes)
    unsupported = [str(operator) for operator in operators if not _has_kernel(operator)]
    if unsupported:
        raise CaptureError(
            f"{name}: ExecuTorch has no kernel for {listed(unsupported)}; use another layer"
        )
    backward = torch.ops.aten.convolution_backward.default
    for node in graph.nodes:
        if operator_of(node) is backward and node.args[2].meta["val"].dim() != 4:  # noqa: PLR2004
            raise CaptureError(
                f"{name}: ExecuTorch's kernel for gradients of convolutions supports only images; "
                "write a Conv1d as a Conv2d over images of height 1"
            )


class RemoveCopies(PassBase):  # type: ignore[misc, unused-ignore]
    """Removes redundant copies: reshapes become views, and pairs of inverse permutations vanish.

    Results have the same bits.
    """

    def call(self, module: fx.GraphModule) -> PassResult:
        """Change the module's graph in place."""
        for node in module.graph.nodes:
            operator = operator_of(node)
            if operator in _RESHAPES and fake_value(node).is_contiguous():
                node.target, node.kwargs = _VIEW, {}
                node.args = (node.args[0], list(fake_value(node).shape))
            elif operator is _aten.permute_copy.default:
                source, dims = node.args
                if operator_of(source) is operator and _is_inverse(source.args[1], dims):
                    node.replace_all_uses_with(source.args[0])
        module.graph.eliminate_dead_code()
        module.recompile()
        return PassResult(module, modified=True)


def _is_inverse(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether the second permutation is the inverse of the first."""
    return [first[dim] % len(first) for dim in second] == list(range(len(first)))


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of another tensor's memory, so that no copy is executed."""
    return (
        node.target is _VIEW
        and fake_value(node).is_contiguous()
        and all(user.op != "output" for user in node.users)
    )


# -- the file, with ExecuTorch's memory plan or ours --------------------------------------------

PLACING_S: Final = 10.0
"""Maximum time to choose offsets [s]."""
METHOD: Final = "forward"
"""Name of the training step's method in the file."""
_INDEX: Final = "__et_training_{}_index_"
"""Methods of a file that return where its gradients and its parameters begin."""


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """The bytes of a program's file, and its arena with ExecuTorch's planner."""

    program: bytes
    greedy_bytes: int
    """Size of the arena with the offsets of ExecuTorch's greedy planner [B]."""

    @property
    def arena_bytes(self) -> int:
        """Size of the arena that the file requires [B]."""
        program = deserialize_pte_binary(self.program).program
        (step,) = (plan for plan in program.execution_plan if plan.name == METHOD)
        return sum(step.non_const_buffer_sizes)


def lower_program(edge: EdgeProgramManager, *, use_our_offsets: bool) -> LoweredProgram:
    """Lower an edge program to a file, with ExecuTorch's offsets or, if `use_our_offsets`, ours."""
    placement = _Placement(use_our_offsets=use_our_offsets)
    suite = MemoryPlanningAlgorithmSuite([placement])
    planning = MemoryPlanningPass(suite, alignment=ALIGNMENT)
    original = _emit_program._get_training_metadata  # noqa: SLF001 - has no other name
    setter = lambda value: setattr(_emit_program, "_get_training_metadata", value)  # noqa: E731
    corrected = lambda methods: _correct_metadata(original(methods), methods)  # noqa: E731
    with suppress_warnings(), infrequent_gc(), temporary_setting(setter, corrected, original):
        # to_executorch changes its input.
        program = copy.deepcopy(edge).to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=planning)
        )
    return LoweredProgram(program.buffer, placement.greedy_bytes)


def _correct_metadata(
    metadata: dict[str, Any], methods: Mapping[str, ExportedProgram]
) -> dict[str, Any]:
    """Return metadata in which the start indices of gradients and parameters are corrected.

    ExecuTorch 1.5.1 also counts new values of buffers, which no method returns, as outputs.
    """
    kinds = {"gradients": OutputKind.GRADIENT_TO_PARAMETER, "parameters": OutputKind.TOKEN}
    for name, program in methods.items():
        specs = program.graph_signature.output_specs
        returned = [spec.kind for spec in specs if spec.kind != OutputKind.BUFFER_MUTATION]
        for category, kind in kinds.items():
            if kind in returned:
                metadata[_INDEX.format(category) + name] = returned.index(kind)
    return metadata


class _Placement:
    """Memory planner for ExecuTorch: its greedy planner or, if `use_our_offsets`, `place_blocks`.

    `greedy_bytes` is the size of the arena of the greedy planner in both cases [B].
    """

    __name__ = "poetmodel"

    def __init__(self, *, use_our_offsets: bool) -> None:
        self._use_our_offsets = use_our_offsets
        self.greedy_bytes = 0

    def __call__(
        self, alignment: int, specs: Iterable[TensorSpec], *options: Any
    ) -> MemoryAlgoResult:
        """Return a memory id and an offset for each tensor."""
        tensor_specs = list(specs)
        result = greedy(alignment, tensor_specs, *options)
        self.greedy_bytes = sum(result.bufsizes)
        if not self._use_our_offsets:
            return result
        length = 1 + max((spec.lifetime[1] for spec in tensor_specs), default=0)
        blocks = [_block(index, spec, length) for index, spec in enumerate(tensor_specs)]
        offsets, size, _ = place_blocks(blocks, length, time_limit=PLACING_S)
        numbered_specs = enumerate(zip(tensor_specs, offsets, strict=True))
        results = {
            spec: SpecAllocResult(1, index, offset) for index, (spec, offset) in numbered_specs
        }
        return MemoryAlgoResult(results, [0, size])


def _block(index: int, spec: TensorSpec, length: int) -> Block:
    """Return the block of a tensor for `place_blocks`.

    Tensors that are in memory during all operations count as present before the first one.
    """
    first_operation, last_operation = spec.lifetime
    position = BEFORE if first_operation == 0 and last_operation + 1 == length else first_operation
    return Block(
        spans=[Span(first_operation, last_operation + 1, spec.allocated_memory)],
        contents=[(position, Content.OUTPUT, index)],
    )
