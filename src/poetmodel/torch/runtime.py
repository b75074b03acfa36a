"""A plan as one training step: its program as Python, run so that all happens or nothing does."""

from __future__ import annotations

import math
import os
import traceback
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.plan import Op, Plan, Program
from poetmodel.torch.graph_signature import InputKind
from poetmodel.torch.interpreter import kernel_of
from poetmodel.torch.pages import PageFile, Pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.torch.tracing import Trace
    from poetmodel.torch.units import Reading, Unit

    Emit = Callable[[int, torch.Tensor], None]
    Function = Callable[[Sequence[Any], Emit, Pages | None], Sequence[torch.Tensor]]


class Runner:
    """A captured step with its compiled program and its page file.

    `plan` is valid; its ``dma`` transfers run on a thread of their own. `numbers` has for each
    tensor of its graph the number of the storage. With `rollback` gradients that are added to
    existing ones wait for the end of steps that page. The page file is made in `folder`.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        numbers: Sequence[int],
        *,
        folder: str | Path | None = None,
        rollback: bool = True,
    ) -> None:
        self.trace = trace
        self.generated = Generated(trace, plan.program, numbers)
        self.file: PageFile | None = None
        self.executor: ThreadPoolExecutor | None = None
        paged = sorted({numbers[i] for op, i in plan.program if op == Op.PAGE_OUT})
        if paged:
            self.file = PageFile(folder or ".", (trace.parts.storages[i] for i in paged))
            if plan.mode == "dma":
                self._start_thread()
        self.waits = self.file is not None and rollback
        """Whether gradients that are added to existing ones wait for the end of the step."""
        joint = trace.joint
        places = {argument.node: place for place, argument in enumerate(joint.arguments)}
        self._places = _gradient_places(trace, places)
        """Where gradients go, by the number of their emission, in the order they come."""
        targets = [emission.result.target for emission in self.generated.held.values()]
        self._loss = targets.index(None)
        self._changed = [places[target.node] for target in targets if target is not None]
        """Places of the arguments that get new values at the end of a step."""
        self._random = any(unit.random for unit in trace.parts.units)
        self._owned = [places[argument.node] for argument in joint.owned]
        self._inputs = [(places[a.node], a.position) for a in joint.of(InputKind.USER_INPUT)]
        lasting = (InputKind.TANGENT, InputKind.CONSTANT_TENSOR)
        self._fixed = [joint.value(a) if a.kind in lasting else None for a in joint.arguments]
        """Arguments that are the same in each step; None for others."""

    @property
    def traffic(self) -> tuple[int, int]:
        """What all steps so far have written and read [B]."""
        return (0, 0) if self.file is None else (self.file.written_bytes, self.file.read_bytes)

    def _start_thread(self) -> None:
        """Start the thread that moves pages; a forked process has none of its parent's."""
        self._process = os.getpid()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="poetmodel-pages")
        weakref.finalize(self, _end, self.executor, self._process)

    def close(self) -> None:
        """Remove the page file, and end its thread."""
        if self.executor is not None:
            _end(self.executor, self._process, wait=True)
        if self.file is not None:
            self.file.close()

    def __call__(self, inputs: Sequence[Any], *, waits: bool | None = None) -> torch.Tensor:
        """Run one step on flat inputs; return the loss. `waits` goes before the field.

        Raises `PageError` if a page is lost; parameters, gradients, buffers and the state of the
        random generator are as before the step then.
        """
        values = self._values(inputs)
        gradients = Gradients(self._places, values, waits=self.waits if waits is None else waits)
        held = self.run(values, gradients.emit)
        with torch.no_grad():
            gradients.commit()
            loss = held.pop(self._loss)
            if held:
                torch._foreach_copy_([values[place] for place in self._changed], held)
        return loss

    def _values(self, inputs: Sequence[Any]) -> list[Any]:
        """Return what the arguments stand for now, in their order."""
        values: list[Any] = self._fixed.copy()
        for place, value in zip(self._owned, self.trace.joint.owned_values(), strict=True):
            values[place] = value
        for place, position in self._inputs:
            values[place] = inputs[position]
        return values

    def run(self, values: Sequence[Any], emit: Emit) -> list[torch.Tensor]:
        """Run the program on the values of the arguments; return those of ``generated.held``.

        `emit` is called with the number of an emission and its gradient, once for each. Nothing but
        the state of the random generator changes outside of the program.
        """
        state = torch.default_generator.get_state() if self._random else None
        pages = self._pages()
        try:
            with torch.no_grad():
                held = list(self.generated.function(values, emit, pages))
                if pages is not None:
                    pages.finish()
        except BaseException as error:
            if pages is not None:
                pages.abandon()
            if state is not None:
                torch.default_generator.set_state(state)
            # The frames of the program would hold its tensors for as long as the exception lives.
            traceback.clear_frames(error.__traceback__)
            raise
        return held

    def _pages(self) -> Pages | None:
        if self.file is None:
            return None
        self.file.check()
        if self.executor is not None and self._process != os.getpid():
            self._start_thread()
        return Pages(self.file, self.executor)


def _end(executor: ThreadPoolExecutor, process: int, *, wait: bool = False) -> None:
    """End a thread in the process that started it; in a forked one it is not there."""
    if os.getpid() == process:
        executor.shutdown(wait=wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the gradient of one emission goes."""

    argument: int
    key: int
    """The same for all gradients of one weight, which has several if it is used by several names;
    they are summed before anything else, as PyTorch does."""
    last: bool
    """Whether no other one of its key comes after it."""
    alone: bool
    """Whether nobody else reads the memory that it lies in."""


class Gradients:
    """The gradients of one step on their way into ``.grad``.

    Where there was no gradient the new one takes its place when the step is done. Where there was
    one, the new one is added to it: at once, or at the end where pages could still fail.
    """

    def __init__(self, places: Mapping[int, Place], values: Sequence[Any], *, waits: bool) -> None:
        self._places = places
        self._values = values
        self._waits = waits
        self._sums: dict[int, torch.Tensor] = {}
        """What came so far, by the key of its place."""

    def emit(self, number: int, value: torch.Tensor) -> None:
        """Take a gradient."""
        place = self._places[number]
        target = self._values[place.argument]
        total = self._sums.pop(place.key, None)
        if total is not None:
            value = total.add_(value)
        if place.last and target.grad is not None and not self._waits:
            target.grad.add_(value)
            return
        # A gradient that fills its memory, in the order of its weight, is handed out as it is.
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        own = place.alone and whole and value.stride() == target.stride()
        if total is None and not own:
            value = torch.empty_like(target, requires_grad=False).copy_(value)
        self._sums[place.key] = value

    def commit(self) -> None:
        """Hand out what has waited."""
        for place in self._places.values():
            if not place.last or place.key not in self._sums:
                continue
            value = self._sums.pop(place.key)
            target = self._values[place.argument]
            if target.grad is None:
                target.grad = value
            else:
                target.grad.add_(value)


def _gradient_places(trace: Trace, arguments: Mapping[fx.Node, int]) -> dict[int, Place]:
    """Return the place of each gradient, by the number of its emission, in the order they come."""
    parts = trace.parts
    readers = [unit.reads for unit in parts.units] + [found.reads for found in parts.emissions]
    read = Counter(number for reads in readers for number in reads.storages)
    targets = {
        number: emission.result.target
        for number, emission in enumerate(parts.emissions)
        if not emission.held and emission.result.target is not None
    }
    keys = {number: id(trace.joint.value(target)) for number, target in targets.items()}
    final = {key: number for number, key in keys.items()}
    return {
        number: Place(
            argument=arguments[targets[number].node],
            key=key,
            last=final[key] == number,
            alone=[read[i] for i in parts.emissions[number].reads.storages] == [1],
        )
        for number, key in keys.items()
    }


# -- the source --------------------------------------------------------------------------------


class Generated:
    """A program as Python, compiled.

    It is a valid plan of the graph that has the storages `numbers` for tensors; all other storages
    are kept as long as anything reads them. Operations that draw random numbers and are recomputed
    do so from the state that they began with the first time.
    """

    def __init__(self, trace: Trace, program: Program, numbers: Sequence[int]) -> None:
        self.parts = trace.parts
        counts = [len(storage.layouts) for storage in trace.parts.storages]
        self.names = [
            tuple(f"t{k}_{place}" for place in range(count)) if count > 1 else (f"t{k}",)
            for k, count in enumerate(counts)
        ]
        """Names of the tensors in each storage."""
        self.arguments = {a.node: f"a{k}" for k, a in enumerate(trace.joint.arguments)}
        self.program = program
        self.numbers = numbers
        self.scheduled = frozenset(numbers)
        self.constants: dict[str, Any] = {
            "get_state": torch.default_generator.get_state,
            "set_state": torch.default_generator.set_state,
        }
        self.constant_names: dict[int, str] = {}
        self.emissions: dict[int | None, list[int]] = {}
        """Numbers of the emissions after each unit."""
        for number, emission in enumerate(trace.parts.emissions):
            self.emissions.setdefault(emission.after, []).append(number)
        self.held = {k: e for k, e in enumerate(trace.parts.emissions) if e.held}
        """What the function returns, by number: the loss, and the new values of buffers."""
        self.count = Counter(step.index for step in program if step.op == Op.COMPUTE)
        self.computed: set[int] = set()
        self.dead = self._dead()
        body = "\n    ".join(self._lines())
        self.source = f"def step(arguments, emit, pages):\n    {body}"
        code = compile(self.source, f"<poetmodel step of {trace.graph.name}>", "exec")
        exec(code, self.constants)  # noqa: S102 - the source is made here, of nothing but numbers
        self.function: Function = self.constants["step"]
        """Takes the values of the arguments, what is called with each gradient, and the pages."""

    def _lines(self) -> Iterator[str]:
        if self.arguments:
            yield f"({', '.join(self.arguments.values())},) = arguments"
        for place, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                yield from self._compute(self.parts.units[index])
                if place in self.dead:
                    yield f"del {', '.join(self.dead[place])}"
                continue
            number = self.numbers[index]
            names = self.names[number]
            if op == Op.PAGE_OUT:
                yield f"pages.out({number}, {names[0]})"
            elif op == Op.PAGE_IN:
                yield f"{', '.join(names)} = pages.into({number})"
            elif op == Op.WAIT:
                yield f"pages.wait({number})"
            else:
                yield f"del {', '.join(names)}"
        for number in self.emissions.get(None, ()):
            yield from self._emit(number)
        yield f"return [{', '.join(f'h{number}' for number in self.held)}]"

    def _compute(self, unit: Unit) -> Iterator[str]:
        first = unit.index not in self.computed
        self.computed.add(unit.index)
        saves = unit.random and self.count[unit.index] > 1
        yield from self._views(unit.reads)
        if saves and first:
            yield f"g{unit.index} = get_state()"
        elif saves:
            yield "now = get_state()"
            yield f"set_state(g{unit.index})"
        made = {
            layout.position: name
            for number in unit.storages
            if first or number in self.scheduled
            for name, layout in zip(
                self.names[number], self.parts.storages[number].layouts, strict=True
            )
        }
        result = made.get(None, "r")
        yield f"{result} = {self._call(unit.node)}"
        if saves and not first:
            yield "set_state(now)"
            yield "del now"
        for position, name in made.items():
            if position is not None:
                yield f"{name} = r[{position}]"
        rest = [*(["r"] if result == "r" else []), *map(_view_name, unit.reads.views)]
        if rest:
            yield f"del {', '.join(rest)}"
        if first:
            for number in self.emissions.get(unit.index, ()):
                yield from self._emit(number)

    def _emit(self, number: int) -> Iterator[str]:
        emission = self.parts.emissions[number]
        value = self._value(emission.result.node)
        yield from self._views(emission.reads)
        if number not in self.held:
            yield f"emit({number}, {value})"
        elif self.scheduled.issuperset(emission.reads.storages) and not self._is_whole(
            emission.result.node
        ):
            # The plan may let the memory go that this is a small part of.
            yield f"h{number} = {value}.clone()"
        else:
            yield f"h{number} = {value}"
        if emission.reads.views:
            yield f"del {', '.join(map(_view_name, emission.reads.views))}"

    def _dead(self) -> dict[int, list[str]]:
        """Return names in kept storages, by the place of the last computation that touches them."""
        last: dict[int, int] = {}
        for place, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                unit = self.parts.units[index]
                touched = (*unit.reads.storages, *unit.storages)
                last.update((number, place) for number in touched if number not in self.scheduled)
        dead: dict[int, list[str]] = {}
        for number, place in last.items():
            dead.setdefault(place, []).extend(self.names[number])
        return dead

    def _views(self, reads: Reading) -> Iterator[str]:
        for view in reads.views:
            yield f"{_view_name(view)} = {self._call(view)}"

    def _call(self, node: fx.Node) -> str:
        words = [self._word(argument) for argument in node.args]
        words += [f"{key}={self._word(value)}" for key, value in node.kwargs.items()]
        return f"{self._constant(kernel_of(node))}({', '.join(words)})"

    def _word(self, value: Any) -> str:
        """Return an argument of an operation as source."""
        if isinstance(value, fx.Node):
            return self._value(value)
        if isinstance(value, list | tuple) and type(value).__module__ != "torch":
            words = "".join(f"{self._word(item)}, " for item in value)
            return f"[{words}]" if isinstance(value, list) else f"({words})"
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        return self._constant(value)

    def _value(self, node: fx.Node) -> str:
        """Return the name of a node's value."""
        if node in self.arguments:
            return self.arguments[node]
        if node in self.parts.direct:
            number, place = self.parts.direct[node]
            return self.names[number][place]
        return _view_name(node)

    def _is_whole(self, node: fx.Node) -> bool:
        """Return whether a node's value is all there is in its storage."""
        if node not in self.parts.direct:
            return False
        number, place = self.parts.direct[node]
        storage = self.parts.storages[number]
        layout = storage.layouts[place]
        return bool(math.prod(layout.shape) * layout.dtype.itemsize == storage.bytes)

    def _constant(self, value: Any) -> str:
        """Return the name of a value that no source can spell."""
        name = self.constant_names.setdefault(id(value), f"c{len(self.constant_names)}")
        self.constants[name] = value
        return name


def _view_name(node: fx.Node) -> str:
    return f"v_{node.name}"
