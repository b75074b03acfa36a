"""The program of a compiled step: its plan as an FX graph and as compiled Python."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.plan import Op
from poetmodel.torch.graph.operators import set_kernel
from poetmodel.torch.graph.python import compile_graph
from poetmodel.torch.graph.rewriting import Rewriter
from poetmodel.torch.step.in_place import argument_position, in_place_kernel
from poetmodel.torch.step.reading import gradient_storages, owns_gradient
from poetmodel.torch.step.updates import ParameterUpdate, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from poetmodel.torch.graph.step_graph import Operation, StepGraph
    from poetmodel.torch.state.pages import Pages
    from poetmodel.torch.step.reading import StepOutput
    from poetmodel.torch.step.scheduled import WholePlan
    from poetmodel.torch.step.trace import Trace

    Emit = Callable[[int, torch.Tensor], None]
    StepFunction = Callable[[Sequence[Any], Emit, Pages | None], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepProgram:
    """The compiled program of a step."""

    graph: fx.Graph
    source: str
    """The function's source in Python."""
    function: StepFunction
    """The compiled function of three arguments: the values of the step's arguments; a callback that
    is called with (output index, value) of each gradient; and the `Pages`, or None without files.
    With an optimizer, the last value is the set of the positions of new moments. Returns the end
    results."""
    end_results: Mapping[int, StepOutput]
    """Outputs that the function returns, by output index, in this order: all except gradients."""


class StepWriter(Rewriter):
    """Writes the program of a plan, which is valid, with blocking transfers.

    The code emits each gradient as soon as it is computed. Storages outside the plan are kept until
    their last reader. A recomputed random operation starts from the random state of its first
    execution. An operator runs in place if the program frees its input right after it.

    State with its home on storage is paged into new memory, updated there, and written back. State
    with its home in RAM needs no instruction.
    """

    def __init__(self, trace: Trace, plan: WholePlan) -> None:
        super().__init__(trace.step_graph.output_keys)
        self.name = f"step of {trace.graph.name}"
        self.step_graph: StepGraph = trace.step_graph
        self.program = plan.program
        self._stored_state = plan.stored_state
        self._scheduled_storages = plan.storages
        self._storages_of_last_use = _storages_by_last_use(trace.step_graph, plan)
        """Storages that are not in the plan, by the position in the program of their last use."""
        self._positions = trace.joint.argument_positions
        for argument in trace.joint.arguments:
            self._placeholders[argument.node] = self.graph.placeholder(argument.node.name)
        self._new_moments = (
            self.graph.placeholder("new") if trace.joint.optimizer is not None else None
        )
        self._emit, self._pages = map(self.graph.placeholder, ("emit", "pages"))
        self.outputs = trace.outputs
        self.end_results = {
            output_index: output
            for output_index, output in enumerate(self.outputs)
            if output.is_returned_at_end
        }
        self._results: dict[int, fx.Node] = {}
        """Node of each end result written so far, by output index."""
        self._outputs_of_operation: dict[int | None, list[int]] = {}
        """Indices of the outputs that are complete after an operation, by the operation's index;
        outputs that no operation computes have the key None."""
        for output_index, output in enumerate(self.outputs):
            self._outputs_of_operation.setdefault(output.last_operation, []).append(output_index)
        self._execution_counts = Counter(
            instruction.index for instruction in plan.program if instruction.op == Op.COMPUTE
        )
        self._random_states: dict[int, fx.Node | None] = {}
        """Node of the random state before the first execution of an operation, by operation index;
        None unless the operation is random and recomputed."""

    def write(self) -> StepProgram:
        """Write the instructions of the program in order, and compile them; call this once."""
        self._write_initial_state()
        for instruction_index, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                self._write_instruction(self.step_graph.operations[index], instruction_index)
            elif op != Op.FREE:  # the compiled code deletes each computed value after its last use
                self._write_page(op, index)
        for output_index in self._outputs_of_operation.get(None, ()):
            self._write_output(output_index)
        self.graph.output([self._results[output_index] for output_index in self.end_results])
        source, function = compile_graph(self.graph, name=self.name, n_separate_arguments=2)
        return StepProgram(
            graph=self.graph,
            source=source,
            function=function,
            end_results=self.end_results,
        )

    def _write_initial_state(self) -> None:
        """Write copies of outputs that are state or inputs before the step: updates overwrite them.

        A gradient that is such a value is emitted without a copy.
        """
        for operation in self.step_graph.operations:
            output_indices = (
                self._outputs_of_operation.get(operation.index, ()) if operation.is_source else ()
            )
            for output_index in output_indices:
                self._write_output(output_index)

    def map_placeholder(self, node: fx.Node) -> fx.Node:
        """Return the node of an argument: its page-in if one was written, else its placeholder."""
        key = self._keys_by_node.get(node)
        if key in self._newest:
            return self._newest[key]
        return self._placeholders[node]

    def _write_instruction(self, operation: Operation, instruction_index: int) -> None:
        """Write an operation or update; of a source only page-ins of its state on storage."""
        if operation.is_source:
            for storage_index in self._stored_state.intersection(operation.storages):
                self._write_page_in(storage_index)
        elif isinstance(operation.node.target, Update):
            self._write_update(operation, operation.node.target, instruction_index)
        else:
            self._write_computation(operation, instruction_index)

    def _write_computation(self, operation: Operation, instruction_index: int) -> None:
        """Write an execution of an operation; the first also writes the outputs that it completes.

        A repeated random operation uses the first random state, and then restores the current one.
        """
        if operation.index not in self._random_states:
            is_repeated = operation.is_random and self._execution_counts[operation.index] > 1
            get_state = torch.default_generator.get_state
            self._random_states[operation.index] = (
                self.graph.call_function(get_state) if is_repeated else None
            )
            self._write_operation(operation, operation.storages, instruction_index)
            for output_index in self._outputs_of_operation.get(operation.index, ()):
                self._write_output(output_index)
            return
        first_state, current_state = self._random_states[operation.index], None
        if first_state is not None:
            current_state = self.graph.call_function(torch.default_generator.get_state)
            self.graph.call_function(torch.default_generator.set_state, (first_state,))
        self._write_operation(
            operation, self._scheduled_storages.intersection(operation.storages), instruction_index
        )
        if current_state is not None:
            self.graph.call_function(torch.default_generator.set_state, (current_state,))

    def _write_update(self, operation: Operation, update: Update, instruction_index: int) -> None:
        """Write a call of `Update.overwrite_state`, which overwrites the memory of the state.

        In `_newest`, the copies of state on storage become those of its replacement, too.
        """
        state: Any = operation.node.args[0]
        options: dict[str, Any] = {}
        if isinstance(update, ParameterUpdate):
            gradients = gradient_storages(self.step_graph, operation)
            freed_storages = self._storages_freed_after(instruction_index)
            options["owns_gradient"] = owns_gradient(
                self.step_graph, operation
            ) and freed_storages.issuperset(gradients)
            if update.rule.moment_keys:
                moment_position = self._positions[state[1]]
                options["is_first"] = self.graph.call_function(
                    operator.contains, (self._new_moments, moment_position)
                )
        arguments: Any = fx.node.map_arg(operation.node.args, self.map_node)
        self.graph.call_function(update.overwrite_state, arguments, options)
        for storage_index in operation.storages:  # the new value overwrote the state
            state_index = self.step_graph.storages[storage_index].replaces
            if state_index in self._stored_state:
                self._newest |= {
                    (storage_index, layout_index): self._newest[state_index, layout_index]
                    for _, layout_index in self.output_keys(state_index)
                }
                self._output_keys[storage_index] = [
                    (storage_index, layout_index)
                    for _, layout_index in self.output_keys(state_index)
                ]

    def _write_operation(
        self, operation: Operation, storage_indices: Iterable[int], instruction_index: int
    ) -> None:
        """Write an operation, in place if it may overwrite an input that is freed right after.

        Its outputs become the newest copies of `storage_indices`.
        """
        new_node = self.write_node(operation.node, storage_indices)
        freed_storages = self._storages_freed_after(instruction_index) if operation.in_place else ()
        for _, input_index in operation.in_place:
            if input_index not in freed_storages:
                continue
            position = argument_position(self.step_graph, operation, input_index)
            kernel = in_place_kernel(operation.node, position)
            if kernel is not None:
                set_kernel(new_node, kernel)
            return

    def _storages_freed_after(self, instruction_index: int) -> set[int]:
        """Return the storages that are freed right after a computation of the program."""
        freed_storages = set(self._storages_of_last_use.get(instruction_index, ()))
        for op, i in self.program[instruction_index + 1 :]:
            if op != Op.FREE:
                break
            freed_storages.add(i)
        return freed_storages

    def _write_page(self, op: Op, storage_index: int) -> None:
        """Write a page-out of a storage's newest copy, or a page-in, unless the graph lacks it."""
        keys = self.output_keys(storage_index)
        if not keys:
            return
        if op == Op.PAGE_OUT:
            newest = self._newest.get(keys[0]) or self.map_node(self._first_nodes[keys[0]])
            self.graph.call_method("page_out", (self._pages, storage_index, newest))
        else:
            self._write_page_in(storage_index)

    def _write_page_in(self, storage_index: int) -> None:
        """Add a page-in to the FX graph; its tensors, one per layout, become the newest copies."""
        page = self.graph.call_method("page_in", (self._pages, storage_index))
        has_one_layout = len(self.step_graph.storages[storage_index].layouts) == 1
        for key in self.output_keys(storage_index):
            output = (
                page
                if has_one_layout
                else self.graph.call_function(operator.getitem, (page, key[1]))
            )
            self._newest[key] = output

    def _write_output(self, output_index: int) -> None:
        """Write the emission of a gradient; add another output, or its copy, to the end results."""
        output = self.outputs[output_index]
        value = self.map_node(output.result.node)
        if output_index not in self.end_results:
            self.graph.call_method("__call__", (self._emit, output_index, value))
            return
        if self._is_copied(output):
            value = self.graph.call_method("clone", (value,))
        self._results[output_index] = value

    def _is_copied(self, output: StepOutput) -> bool:
        """Return whether to copy an output: it is or views state or an input, or a larger storage.

        The latter would otherwise stay in RAM.
        """
        storage_indices = output.reads.storages
        maker_indices = (self.step_graph.storages[i].operation for i in storage_indices)
        if any(self.step_graph.operations[index].is_source for index in maker_indices):
            return True
        is_scheduled = self._scheduled_storages.issuperset(storage_indices)
        return is_scheduled and not self._fills_storage(output.result.node)

    def _fills_storage(self, node: fx.Node) -> bool:
        """Return whether a node is an output that fills its whole storage; sources count."""
        if node not in self.step_graph.output_keys:
            return False
        storage_index, layout_index = self.step_graph.output_keys[node]
        storage = self.step_graph.storages[storage_index]
        layout = storage.layouts[layout_index]
        return bool(math.prod(layout.shape) * layout.dtype.itemsize == storage.bytes)


def _storages_by_last_use(step_graph: StepGraph, plan: WholePlan) -> dict[int, list[int]]:
    """Return unscheduled storages by the index of the instruction that last reads or makes them."""
    last_use: dict[int, int] = {}
    for instruction_index, (op, index) in enumerate(plan.program):
        if op == Op.COMPUTE:
            operation = step_graph.operations[index]
            used_storages = (*operation.reads.storages, *operation.storages)
            last_use.update(
                (storage_index, instruction_index)
                for storage_index in used_storages
                if storage_index not in plan.storages
            )
    storages_by_instruction: dict[int, list[int]] = {}
    for storage_index, instruction_index in last_use.items():
        storages_by_instruction.setdefault(instruction_index, []).append(storage_index)
    return storages_by_instruction
