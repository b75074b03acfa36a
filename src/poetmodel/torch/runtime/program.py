"""The program of a compiled step: its plan as an FX graph and as compiled Python."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.plan import Op, Program
from poetmodel.torch.graph.operators import set_kernel
from poetmodel.torch.graph.python import python_function
from poetmodel.torch.graph.rewriting import Rewriter
from poetmodel.torch.step.in_place import argument_position, in_place_kernel
from poetmodel.torch.step.updates import ParameterUpdate, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from poetmodel.torch.graph.step_graph import Operation
    from poetmodel.torch.state.pages import Pages
    from poetmodel.torch.step.captured import CapturedGraph, StepOutput
    from poetmodel.torch.step.trace import Trace
    from poetmodel.torch.step.training import TrainingGraph

    Emit = Callable[[int, torch.Tensor], None]
    Function = Callable[[Sequence[Any], Emit, Pages | None], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepProgram:
    """The compiled program of a step."""

    graph: fx.Graph
    source: str
    """The function's source in Python."""
    function: Function
    """Takes the values of the arguments, a callback for each gradient, and the pages."""
    end_results: Mapping[int, StepOutput]
    """Outputs that the function returns, by output index: the loss, new values of buffers."""
    state_indices: Mapping[int, int]
    """Storage index of the state, for state on storage and for its replacements."""


class StepWriter(Rewriter):
    """Writes a program that emits gradients as soon as they exist, and pages as planned.

    The program is a valid plan of a graph whose tensors are the storages `storage_indices`. All
    other storages are kept until their last reader. A random operation that is recomputed starts
    from the random state of its first execution. `state_indices` is that of `StepProgram`.
    """

    def __init__(
        self,
        trace: Trace,
        program: Program,
        storage_indices: Sequence[int],
        *,
        state_indices: Mapping[int, int] | None = None,
    ) -> None:
        """Begin a graph with the arguments of the step; `write` adds the operations."""
        super().__init__(trace.step_graph.output_keys)
        self.name = f"step of {trace.graph.name}"
        self.state_indices = dict(state_indices or {})
        self.step_graph: CapturedGraph = trace.step_graph
        self.program = program
        self.storage_indices = storage_indices
        self._scheduled = frozenset(storage_indices)
        for argument in trace.joint.arguments:
            self._placeholders[argument.node] = self.graph.placeholder(argument.node.name)
        self._new = self.graph.placeholder("new") if trace.joint.optimizer is not None else None
        self._emit, self._pages = map(self.graph.placeholder, ("emit", "pages"))
        outputs = self.step_graph.outputs
        self.end_results = {k: o for k, o in enumerate(outputs) if o.is_returned_at_end}
        self._results: dict[int, fx.Node] = {}
        self._completed: dict[int | None, list[int]] = {}
        """Indices of the outputs that each operation completes."""
        for number, output in enumerate(outputs):
            self._completed.setdefault(output.last_operation, []).append(number)
        self._count = Counter(step.index for step in program if step.op == Op.COMPUTE)
        self._states: dict[int, fx.Node | None] = {}
        """The random state before each operation; None unless the operation is random and
        recomputed."""

    def write(self) -> StepProgram:
        """Write and compile the program; call this once."""
        self._write_initial_state()
        for point, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                self._compute(self.step_graph.operations[index], point)
            elif op != Op.FREE:  # Python frees each value after its last use
                self._write_page(op, self.storage_indices[index])
        for number in self._completed.get(None, ()):
            self._write_output(number)
        self.graph.output([self._results[number] for number in self.end_results])
        source, function = python_function(self.graph, name=self.name, n_separate=2)
        return StepProgram(
            graph=self.graph,
            source=source,
            function=function,
            end_results=self.end_results,
            state_indices=self.state_indices,
        )

    def _write_initial_state(self) -> None:
        """Write nodes for state before the first operation; none by default."""

    def _compute(self, operation: Operation, point: int) -> None:
        """Write an execution of an operation with its outputs and random states."""
        if operation.index not in self._states:
            is_repeated = operation.is_random and self._count[operation.index] > 1
            get_state = torch.default_generator.get_state
            self._states[operation.index] = (
                self.graph.call_function(get_state) if is_repeated else None
            )
            self._write_operation(operation, operation.storages, point)
            for number in self._completed.get(operation.index, ()):
                self._write_output(number)
            return
        first_state, current_state = self._states[operation.index], None
        if first_state is not None:
            current_state = self.graph.call_function(torch.default_generator.get_state)
            self.graph.call_function(torch.default_generator.set_state, (first_state,))
        self._write_operation(operation, self._scheduled.intersection(operation.storages), point)
        if current_state is not None:
            self.graph.call_function(torch.default_generator.set_state, (current_state,))

    def _write_operation(
        self, operation: Operation, storage_indices: Iterable[int], point: int
    ) -> None:
        """Write an operation that makes storages `storage_indices`, at a point of the program."""
        del point
        self.write_node(operation.node, storage_indices)

    def _write_page(self, op: Op, number: int) -> None:
        """Write a page-out or page-in of a storage, unless no node reads the storage."""
        keys = self.output_keys(number)
        if not keys:
            return
        if op == Op.PAGE_OUT:
            newest = self._newest.get(keys[0]) or self.map_node(self._first_nodes[keys[0]])
            self.graph.call_method("page_out", (self._pages, number, newest))
        else:
            self._page_in(number)

    def _page_in(self, number: int) -> None:
        """Write a page-in, whose result becomes the newest copy of the storage."""
        page = self.graph.call_method("page_in", (self._pages, number))
        has_one_layout = len(self.step_graph.storages[number].layouts) == 1
        for key in self.output_keys(number):
            output = (
                page
                if has_one_layout
                else self.graph.call_function(operator.getitem, (page, key[1]))
            )
            self._newest[key] = output

    def _write_output(self, number: int) -> None:
        """Write the emission of a gradient, or store another output until the end."""
        output = self.step_graph.outputs[number]
        value = self.map_node(output.result.node)
        if number not in self.end_results:
            self.graph.call_method("__call__", (self._emit, number, value))
            return
        if self._is_copied(output):
            value = self.graph.call_method("clone", (value,))
        self._results[number] = value

    def _is_copied(self, output: StepOutput) -> bool:
        """Return whether an output is copied, because it is part of a storage that may be freed."""
        return self._scheduled.issuperset(output.reads.storages) and not self._fills_storage(
            output.result.node
        )

    def _fills_storage(self, node: fx.Node) -> bool:
        """Return whether a node's value has all bytes of its storage."""
        if node not in self.step_graph.output_keys:
            return False
        number, index = self.step_graph.output_keys[node]
        storage = self.step_graph.storages[number]
        layout = storage.layouts[index]
        return bool(math.prod(layout.shape) * layout.dtype.itemsize == storage.bytes)


class TrainingWriter(StepWriter):
    """Writes a program whose operations include state, inputs and updates.

    State with its home in RAM needs no instruction. State on storage is paged into new memory when
    its operation is computed, updated there, and written back. An operator that may run in place
    does so if the program frees its input right after it. `resident` has the state tensors of the
    program's graph with their home in RAM.
    """

    step_graph: TrainingGraph

    def __init__(
        self,
        trace: Trace,
        program: Program,
        storage_indices: Sequence[int],
        *,
        resident: Collection[int],
    ) -> None:
        """Begin as `StepWriter`; derive from `resident` the state with its home on storage."""
        replacement_of, state = trace.graph.replacement_of, set(trace.graph.state_tensors)
        on_storage = {
            number for i, number in enumerate(storage_indices) if i not in resident
        } & state
        state_indices = {number: number for number in sorted(on_storage)}
        state_indices |= {
            replacement_of[number]: number
            for number in sorted(on_storage)
            if number in replacement_of
        }
        self._last_uses = _last_uses(trace.step_graph, program, frozenset(storage_indices))
        """Storages without decision, by the point of the last computation that uses them."""
        self._positions = {a.node: k for k, a in enumerate(trace.joint.arguments)}
        super().__init__(trace, program, storage_indices, state_indices=state_indices)

    def _write_initial_state(self) -> None:
        """Write the outputs that are values of state before the step."""
        for operation in self.step_graph.operations:
            output_indices = self._completed.get(operation.index, ()) if operation.is_source else ()
            for output_index in output_indices:
                self._write_output(output_index)

    def map_placeholder(self, node: fx.Node) -> fx.Node:
        """Return the node of an argument: its page if it was paged in, else its placeholder."""
        key = self._keys_by_node.get(node)
        if key in self._newest:
            return self._newest[key]
        return self._placeholders[node]

    def _compute(self, operation: Operation, point: int) -> None:
        """Write an operation: nothing for state in RAM, a page-in for state on storage."""
        if operation.is_source:
            for number in self.state_indices.keys() & set(operation.storages):
                self._page_in(number)
        elif isinstance(operation.node.target, Update):
            self._update(operation, operation.node.target, point)
        else:
            super()._compute(operation, point)

    def _update(self, operation: Operation, update: Update, point: int) -> None:
        """Write a call of `Update.overwrite_state`, which overwrites the memory of the state."""
        state: Any = operation.node.args[0]
        options: dict[str, Any] = {}
        if isinstance(update, ParameterUpdate):
            gradient = set(self.step_graph.gradient_storages(operation))
            freed = self._storages_freed_after(point)
            options["owns_gradient"] = (
                self.step_graph.owns_gradient(operation) and gradient <= freed
            )
            if update.rule.moment_keys:
                moment = self._positions[state[1]]
                options["is_first"] = self.graph.call_function(
                    operator.contains, (self._new, moment)
                )
        arguments: Any = fx.node.map_arg(operation.node.args, self.map_node)
        self.graph.call_function(update.overwrite_state, arguments, options)
        for number in operation.storages:  # the new value is in the memory of the state
            home = self.step_graph.storages[number].replaces
            if home in self.state_indices:
                self._newest |= {
                    (number, k): self._newest[home, k] for _, k in self.output_keys(home)
                }
                self._output_keys[number] = [(number, k) for _, k in self.output_keys(home)]

    def _write_operation(
        self, operation: Operation, storage_indices: Iterable[int], point: int
    ) -> None:
        """Write an operation, in place if the program frees the overwritten input after it."""
        new_node = self.write_node(operation.node, storage_indices)
        freed_storages = self._storages_freed_after(point) if operation.in_place else ()
        for _, input_index in operation.in_place:
            if input_index not in freed_storages:
                continue
            position = argument_position(self.step_graph, operation, input_index)
            kernel = in_place_kernel(operation.node, position)
            if kernel is not None:
                set_kernel(new_node, kernel)
            return

    def _storages_freed_after(self, point: int) -> set[int]:
        """Return the storages that the program frees right after a computation."""
        freed_storages = set(self._last_uses.get(point, ()))
        for op, i in self.program[point + 1 :]:
            if op != Op.FREE:
                break
            freed_storages.add(self.storage_indices[i])
        return freed_storages

    def _is_copied(self, output: StepOutput) -> bool:
        """Return whether an output is copied: also if it is a value of state before the step."""
        makers = (self.step_graph.storages[i].operation for i in output.reads.storages)
        is_state = any(self.step_graph.operations[maker].is_source for maker in makers)
        return is_state or super()._is_copied(output)


def _last_uses(
    step_graph: CapturedGraph, program: Program, scheduled: Collection[int]
) -> dict[int, list[int]]:
    """Return unscheduled storages, by the point of the last computation that uses them."""
    last_point: dict[int, int] = {}
    for point, (op, index) in enumerate(program):
        if op == Op.COMPUTE:
            operation = step_graph.operations[index]
            used_storages = (*operation.reads.storages, *operation.storages)
            last_point.update(
                (number, point) for number in used_storages if number not in scheduled
            )
    by_point: dict[int, list[int]] = {}
    for number, point in last_point.items():
        by_point.setdefault(point, []).append(number)
    return by_point
