"""A module and its loss as an edge program of ExecuTorch, and that program as a file with offsets.

The conversions are those of ExecuTorch's training support: ``torch.export``,
``_export_forward_backward``, ``to_edge``.
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
from poetmodel.errors import join_names
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
from poetmodel.torch.capturing.joint import LOSS, check_snapshot
from poetmodel.torch.capturing.process_state import temporary_setting
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
"""Operator of reshapes that ExecuTorch executes without a copy."""

_BROKEN_OPERATORS: Final = frozenset({_aten.max_pool2d_with_indices_backward.default})
"""Operators whose kernels are wrong: they add the result to the old content of the output."""

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
"""Operators that copy an input, perhaps with another shape. Of these, ExecuTorch executes only
``view_copy`` without a copy, unless its output is a result."""


def capture_edge_program(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> EdgeProgramManager:
    """Return the edge program of a training step, for ExecuTorch's portable kernels.

    Its inputs are the tensors in `inputs`, flattened; its results new values of buffers, the loss,
    and the gradients of trained parameters. With `loss_fn`, the last input is its target. `name`
    begins error messages.
    """
    refuse(name, step_errors(model, loss_fn, inputs))
    check_snapshot(name, model, loss_fn, inputs)
    with (
        suppress_warnings(),
        infrequent_gc(),
        convert_exceptions(name),
        sdpa_kernel(SDPBackend.MATH),
    ):
        step, tensors = _make_loss_module(name, model, loss_fn, inputs)
        exported_program = torch.export.export(step, tensors, strict=False)
        edge = _to_edge(_export_forward_backward(exported_program))
    _check_kernels(name, edge.exported_program().graph)
    return edge


def _make_loss_module(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return (module that computes the loss from the tensors in `inputs`, these tensors).

    The module is a shallow copy of the model, so that parameters retain their names. Inputs that
    are no tensors become constants.
    """
    flat_inputs, structure = flatten(inputs)
    model_inputs = inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    uses_keywords = takes_keywords(model, model_inputs)

    def forward(*tensors: torch.Tensor) -> Any:
        """Return the loss; inputs that are no tensors are constants."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat_inputs]
        batch = unflatten(leaves, structure)
        arguments = batch if loss_fn is None else batch[:-1]
        output = model(**arguments[0]) if uses_keywords else model(*arguments)
        loss: torch.Tensor = find_loss(
            name, output if loss_fn is None else loss_fn(output, batch[-1])
        )
        return loss

    step = copy.copy(model)
    step.forward = forward
    vars(step).update(_forward_hooks={}, _forward_pre_hooks={})  # calling the model runs its hooks
    if isinstance(loss_fn, torch.nn.Module):
        vars(step)["_modules"] = {**model._modules, LOSS: loss_fn}  # noqa: SLF001 - of a copy
    return step, tuple(value for value in flat_inputs if isinstance(value, torch.Tensor))


def _to_edge(joint_program: ExportedProgram) -> EdgeProgramManager:
    """Convert a step to an edge program; decompose operators without a kernel if possible."""
    decompositions = _default_decomposition_table()

    def add_decompositions(graph: fx.Graph) -> bool:
        """Add PyTorch's decompositions of operators without a kernel; return whether any is new."""
        calls = (operator_of(node) for node in graph.nodes)
        new_decompositions = {
            operator: decomposition_table[operator]
            for operator in set(calls) & (decomposition_table.keys() - decompositions.keys())
            if not _has_kernel(operator)
        }
        decompositions.update(new_decompositions)
        return bool(new_decompositions)

    while True:
        while add_decompositions(joint_program.graph):
            joint_program = joint_program.run_decompositions(decompositions)
        edge = to_edge(joint_program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        if not add_decompositions(edge.exported_program().graph):
            return edge
        joint_program = joint_program.run_decompositions(decompositions)


def _has_kernel(operator: Any) -> bool:
    """Return whether ExecuTorch's portable kernels implement an operator correctly.

    Views count as implemented: ExecuTorch later replaces each by a copy, which is checked then.
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
    return operator not in _BROKEN_OPERATORS and f"{schema.name}.{overload}" in registered_names


def operator_of(node: fx.Node) -> Any:
    """Return PyTorch's operator for a node of an edge program, else the node's target."""
    return getattr(node.target, "_op", node.target)


def _check_kernels(name: str, graph: fx.Graph) -> None:
    """Raise a `CaptureError` that names all operators without a kernel."""
    operators = dict.fromkeys(operator_of(node) for node in graph.nodes)
    unsupported_names = [str(operator) for operator in operators if not _has_kernel(operator)]
    if unsupported_names:
        raise CaptureError(
            f"{name}: ExecuTorch has no kernel for {join_names(unsupported_names)}; use "
            "another layer"
        )
    backward = torch.ops.aten.convolution_backward.default
    for node in graph.nodes:
        if operator_of(node) is backward and node.args[2].meta["val"].dim() != 4:  # noqa: PLR2004
            raise CaptureError(
                f"{name}: ExecuTorch's kernel for gradients of convolutions supports only images; "
                "write a Conv1d as a Conv2d over images of height 1"
            )


class RemoveCopies(PassBase):  # type: ignore[misc, unused-ignore]
    """Graph pass that replaces reshapes by views, and removes pairs of inverse permutations."""

    def call(self, module: fx.GraphModule) -> PassResult:
        """Replace reshapes by views and remove inverse permutations and unused nodes, in place."""
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


def _is_inverse(permutation: Sequence[int], other_permutation: Sequence[int]) -> bool:
    """Return whether `other_permutation` is the inverse of `permutation`."""
    return [permutation[dim] % len(permutation) for dim in other_permutation] == list(
        range(len(permutation))
    )


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a ``view_copy`` that ExecuTorch executes without a copy.

    It must be no result of the graph, because ExecuTorch copies results.
    """
    return (
        node.target is _VIEW
        and fake_value(node).is_contiguous()
        and all(user.op != "output" for user in node.users)
    )


# -- the file, with offsets of ExecuTorch's planner or ours ---------------------------------------

PLACING_S: Final = 10.0
"""Maximum time to choose offsets [s]."""
METHOD_NAME: Final = "forward"
"""Name of the training step's method in the file."""
_INDEX_METHOD: Final = "__et_training_{}_index_"
"""Name of a file's method that returns the position of the first gradient or parameter among the
outputs, for ``gradients`` or ``parameters``; the name of the step's method follows."""


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """The content of a program's file, and sizes of its arena."""

    program: bytes
    greedy_bytes: int
    """Size of the arena with the offsets of ExecuTorch's greedy planner [B]."""

    @property
    def arena_bytes(self) -> int:
        """Size of the arena that the file requires [B]."""
        program = deserialize_pte_binary(self.program).program
        (step,) = (plan for plan in program.execution_plan if plan.name == METHOD_NAME)
        return sum(step.non_const_buffer_sizes)


def lower_program(edge: EdgeProgramManager, *, use_our_offsets: bool) -> LoweredProgram:
    """Return the content of an edge program's file, and its arena size with greedy offsets.

    Patches ExecuTorch's function for metadata meanwhile, see `_correct_metadata`.
    """
    planner = _MemoryPlanner(use_our_offsets=use_our_offsets)
    suite = MemoryPlanningAlgorithmSuite([planner])
    planning_pass = MemoryPlanningPass(suite, alignment=ALIGNMENT)
    original_function = _emit_program._get_training_metadata  # noqa: SLF001 - has no other name
    set_function = lambda value: setattr(_emit_program, "_get_training_metadata", value)  # noqa: E731
    corrected_function = lambda methods: _correct_metadata(original_function(methods), methods)  # noqa: E731
    with (
        suppress_warnings(),
        infrequent_gc(),
        temporary_setting(set_function, corrected_function, original_function),
    ):
        # to_executorch changes its input.
        program = copy.deepcopy(edge).to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=planning_pass)
        )
    return LoweredProgram(program.buffer, planner.greedy_bytes)


def _correct_metadata(
    metadata: dict[str, Any], methods: Mapping[str, ExportedProgram]
) -> dict[str, Any]:
    """Correct the start indices of gradients and parameters in place; return `metadata`.

    ExecuTorch 1.5.1 counts new values of buffers, too, but no method returns these.
    """
    kind_of_category = {
        "gradients": OutputKind.GRADIENT_TO_PARAMETER,
        "parameters": OutputKind.TOKEN,  # by this kind ExecuTorch marks parameters
    }
    for name, program in methods.items():
        specs = program.graph_signature.output_specs
        returned_kinds = [spec.kind for spec in specs if spec.kind != OutputKind.BUFFER_MUTATION]
        for category, kind in kind_of_category.items():
            if kind in returned_kinds:
                metadata[_INDEX_METHOD.format(category) + name] = returned_kinds.index(kind)
    return metadata


class _MemoryPlanner:
    """Memory planner: `place_blocks` if `use_our_offsets`, else ExecuTorch's greedy planner."""

    __name__ = "poetmodel"

    def __init__(self, *, use_our_offsets: bool) -> None:
        self._use_our_offsets = use_our_offsets
        self.greedy_bytes = 0

    def __call__(
        self, alignment: int, specs: Iterable[TensorSpec], *options: Any
    ) -> MemoryAlgoResult:
        """Return a memory id and an offset for each tensor, and the sizes of memories.

        Sets `greedy_bytes`, the arena size of the greedy planner [B].
        """
        tensor_specs = list(specs)
        result = greedy(alignment, tensor_specs, *options)
        self.greedy_bytes = sum(result.bufsizes)
        if not self._use_our_offsets:
            return result
        n_operations = 1 + max((spec.lifetime[1] for spec in tensor_specs), default=0)
        blocks = [_make_block(index, spec, n_operations) for index, spec in enumerate(tensor_specs)]
        offsets, size, _ = place_blocks(blocks, n_operations, time_limit=PLACING_S)
        numbered_specs = enumerate(zip(tensor_specs, offsets, strict=True))
        results = {
            spec: SpecAllocResult(1, index, offset) for index, (spec, offset) in numbered_specs
        }
        return MemoryAlgoResult(results, [0, size])


def _make_block(index: int, spec: TensorSpec, n_operations: int) -> Block:
    """Return the block of tensor `index`; if it is in RAM throughout, its position is BEFORE."""
    first_operation, last_operation = spec.lifetime
    position = (
        BEFORE if first_operation == 0 and last_operation + 1 == n_operations else first_operation
    )
    return Block(
        spans=[Span(first_operation, last_operation + 1, spec.allocated_memory)],
        contents=[(position, Content.OUTPUT, index)],
    )
