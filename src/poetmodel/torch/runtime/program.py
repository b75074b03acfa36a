"""The program of a compiled step: its plan as an FX graph, and as Python, compiled once."""

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
    """The program of a step, compiled."""

    graph: fx.Graph
    source: str
    """The function in Python."""
    function: Function
    """Takes the values of the arguments, what is called with each gradient, and the pages."""
    held: Mapping[int, StepOutput]
    """Results of the function, by number: the loss, and the new values of buffers."""
    homes: Mapping[int, int]
    """State on storage and what replaces it, each with the number of the state."""


class StepWriter(Rewriter):
    """Writes a program that hands out gradients as they come, and names its pages.

    It is a valid plan of the graph that has the storages `numbers` for tensors; all other storages
    are kept as long as anything reads them. Operations that draw random numbers and are recomputed
    do so from the state that they began with the first time. `homes` as of `StepProgram`.
    """

    def __init__(
        self,
        trace: Trace,
        program: Program,
        numbers: Sequence[int],
        *,
        homes: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(trace.parts.direct)
        self.name = f"step of {trace.graph.name}"
        self.homes = dict(homes or {})
        self.parts: CapturedGraph = trace.parts
        self.program = program
        self.numbers = numbers
        self._scheduled = frozenset(numbers)
        for argument in trace.joint.arguments:
            self._arguments[argument.node] = self.graph.placeholder(argument.node.name)
        self._new = self.graph.placeholder("new") if trace.joint.optimizer is not None else None
        self._emit, self._pages = map(self.graph.placeholder, ("emit", "pages"))
        self.held = {k: e for k, e in enumerate(self.parts.outputs) if e.is_returned_at_end}
        self._results: dict[int, fx.Node] = {}
        self._after: dict[int | None, list[int]] = {}
        """Numbers of the outputs after each operation."""
        for number, output in enumerate(self.parts.outputs):
            self._after.setdefault(output.completed_by, []).append(number)
        self._count = Counter(step.index for step in program if step.op == Op.COMPUTE)
        self._states: dict[int, fx.Node | None] = {}
        """The random state that each operation began with, if it repeats; None if it does not."""

    def write(self) -> StepProgram:
        """Write the program, once."""
        self._write_initial_state()
        for point, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                self._compute(self.parts.operations[index], point)
            elif op != Op.FREE:  # each value goes when nothing reads it any more
                self._page(op, self.numbers[index])
        for number in self._after.get(None, ()):
            self._hand_out(number)
        self.graph.output([self._results[number] for number in self.held])
        source, function = python_function(self.graph, name=self.name, named=2)
        return StepProgram(
            graph=self.graph, source=source, function=function, held=self.held, homes=self.homes
        )

    def _write_initial_state(self) -> None:
        """Write nodes for state before the first operation; none by default."""

    def _compute(self, operation: Operation, point: int) -> None:
        if operation.index not in self._states:
            repeats = operation.is_random and self._count[operation.index] > 1
            get = torch.default_generator.get_state
            self._states[operation.index] = self.graph.call_function(get) if repeats else None
            self._run(operation, operation.storages, point)
            for number in self._after.get(operation.index, ()):
                self._hand_out(number)
            return
        before, now = self._states[operation.index], None
        if before is not None:
            now = self.graph.call_function(torch.default_generator.get_state)
            self.graph.call_function(torch.default_generator.set_state, (before,))
        self._run(operation, self._scheduled.intersection(operation.storages), point)
        if now is not None:
            self.graph.call_function(torch.default_generator.set_state, (now,))

    def _run(self, operation: Operation, numbers: Iterable[int], point: int) -> None:
        """Add an operation, at a point of the program."""
        del point
        self.compute(operation.node, numbers)

    def _page(self, op: Op, number: int) -> None:
        places = self.places(number)
        if not places:
            return
        if op == Op.PAGE_OUT:
            newest = self._current.get(places[0]) or self.value(self._shown[places[0]])
            self.graph.call_method("page_out", (self._pages, number, newest))
        else:
            self._page_in(number)

    def _page_in(self, number: int) -> None:
        new = self.graph.call_method("page_in", (self._pages, number))
        alone = len(self.parts.storages[number].layouts) == 1
        for place in self.places(number):
            output = new if alone else self.graph.call_function(operator.getitem, (new, place[1]))
            self._current[place] = output

    def _hand_out(self, number: int) -> None:
        """Hand out a gradient, or hold another result until the end."""
        output = self.parts.outputs[number]
        value = self.value(output.result.node)
        if number not in self.held:
            self.graph.call_method("__call__", (self._emit, number, value))
            return
        if self._is_copied(output):
            value = self.graph.call_method("clone", (value,))
        self._results[number] = value

    def _is_copied(self, output: StepOutput) -> bool:
        """Whether the plan may let the memory go that a result is a small part of."""
        return self._scheduled.issuperset(output.reads.storages) and not self._is_whole(
            output.result.node
        )

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether a node's value is all there is in its storage."""
        if node not in self.parts.direct:
            return False
        number, index = self.parts.direct[node]
        storage = self.parts.storages[number]
        layout = storage.layouts[index]
        return bool(math.prod(layout.shape) * layout.dtype.itemsize == storage.bytes)


class TrainingWriter(StepWriter):
    """Writes a program whose operations are state, inputs and updates too.

    State whose home is RAM is there throughout: to compute it is to do nothing. State on storage is
    read into memory of its own where the program says so, updated there, and written back. An
    operator that may run in place does so where the program lets its input go right after it.
    `resident` are the state tensors of the graph of the program whose home is RAM.
    """

    parts: TrainingGraph

    def __init__(
        self, trace: Trace, program: Program, numbers: Sequence[int], *, resident: Collection[int]
    ) -> None:
        new, state = trace.graph.replacement_of, set(trace.graph.state_tensors)
        away = {number for i, number in enumerate(numbers) if i not in resident} & state
        homes = {number: number for number in sorted(away)}
        homes |= {new[number]: number for number in sorted(away) if number in new}
        self._dead = _dead(trace.parts, program, frozenset(numbers))
        """Kept storages, by the point of the last computation that touches them."""
        self._positions = {a.node: k for k, a in enumerate(trace.joint.arguments)}
        super().__init__(trace, program, numbers, homes=homes)

    def _write_initial_state(self) -> None:
        """Hand out state as it is before the step."""
        for operation in self.parts.operations:
            for number in self._after.get(operation.index, ()) if operation.is_source else ():
                self._hand_out(number)

    def argument(self, node: fx.Node) -> fx.Node:
        """Return the node that has the value of an argument: a page, if its home is storage."""
        place = self._direct.get(node)
        if place in self._current:
            return self._current[place]
        return self._arguments[node]

    def _compute(self, operation: Operation, point: int) -> None:
        if operation.is_source:
            for number in self.homes.keys() & set(operation.storages):
                self._page_in(number)
        elif isinstance(operation.node.target, Update):
            self._update(operation, operation.node.target, point)
        else:
            super()._compute(operation, point)

    def _update(self, operation: Operation, update: Update, point: int) -> None:
        state: Any = operation.node.args[0]
        options: dict[str, Any] = {}
        if isinstance(update, ParameterUpdate):
            gradient = set(self.parts.gradient_storages(operation))
            options["owned"] = self.parts.owns_gradient(operation) and gradient <= self._dying(
                point
            )
            if update.rule.moments:
                moment = self._positions[state[1]]
                options["first"] = self.graph.call_function(operator.contains, (self._new, moment))
        arguments: Any = fx.node.map_arg(operation.node.args, self.value)
        self.graph.call_function(update.replace, arguments, options)
        for number in operation.storages:  # what is new lies where the state does
            home = self.parts.storages[number].replaces
            if home in self.homes:
                self._current |= {(number, k): self._current[home, k] for _, k in self.places(home)}
                self._places[number] = [(number, k) for _, k in self.places(home)]

    def _run(self, operation: Operation, numbers: Iterable[int], point: int) -> None:
        new = self.compute(operation.node, numbers)
        dying = self._dying(point) if operation.in_place else ()
        for _, read in operation.in_place:
            if read not in dying:
                continue
            kernel = in_place_kernel(operation.node, argument_position(self.parts, operation, read))
            if kernel is not None:
                set_kernel(new, kernel)
            return

    def _dying(self, point: int) -> set[int]:
        """Return the storages that the program lets go right after a computation."""
        dying = set(self._dead.get(point, ()))
        for op, i in self.program[point + 1 :]:
            if op != Op.FREE:
                break
            dying.add(self.numbers[i])
        return dying

    def _is_copied(self, output: StepOutput) -> bool:
        """Whether a result is state as it is before the step, or a small part of memory."""
        makers = (self.parts.storages[i].operation for i in output.reads.storages)
        from_state = any(self.parts.operations[maker].is_source for maker in makers)
        return from_state or super()._is_copied(output)


def _dead(
    parts: CapturedGraph, program: Program, scheduled: Collection[int]
) -> dict[int, list[int]]:
    """Return kept storages, by the point of the last computation that touches them."""
    last: dict[int, int] = {}
    for point, (op, index) in enumerate(program):
        if op == Op.COMPUTE:
            operation = parts.operations[index]
            touched = (*operation.reads.storages, *operation.storages)
            last.update((number, point) for number in touched if number not in scheduled)
    dead: dict[int, list[int]] = {}
    for number, point in last.items():
        dead.setdefault(point, []).append(number)
    return dead
