"""The source: a program as Python, without loops or branches, compiled once."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.plan import Op, Program
from poetmodel.torch.capturing.replay import kernel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from poetmodel.torch.state.pages import Pages
    from poetmodel.torch.step.trace import Trace
    from poetmodel.torch.step.units import Reading, Unit

    Emit = Callable[[int, torch.Tensor], None]
    Function = Callable[[Sequence[Any], Emit, Pages | None], Sequence[torch.Tensor]]


class Generated:
    """A program as Python, compiled.

    It is a valid plan of the graph that has the storages `numbers` for tensors; all other storages
    are kept as long as anything reads them. Operations that draw random numbers and are recomputed
    do so from the state that they began with the first time. `homes` are state on storage and what
    replaces it, each with the number of the state.
    """

    def __init__(
        self,
        trace: Trace,
        program: Program,
        numbers: Sequence[int],
        *,
        homes: Mapping[int, int] | None = None,
    ) -> None:
        self.parts = trace.parts
        self.homes = dict(homes or {})
        self.arguments = {a.node: f"a{k}" for k, a in enumerate(trace.joint.arguments)}
        self.names = self._storage_names()
        """Names of the tensors in each storage."""
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
        """Results of the function, by number: the loss, and the new values of buffers."""
        self.count = Counter(step.index for step in program if step.op == Op.COMPUTE)
        self.computed: set[int] = set()
        self.dead = self._dead()
        """Kept storages, by the point of the last computation that touches them."""
        body = "\n    ".join(self._lines())
        self.source = f"def step(arguments, emit, pages):\n    {body}"
        code = compile(self.source, f"<poetmodel step of {trace.graph.name}>", "exec")
        exec(code, self.constants)  # noqa: S102 - the source is made here, of nothing but numbers
        self.function: Function = self.constants["step"]
        """Takes the values of the arguments, what is called with each gradient, and the pages."""

    def _lines(self) -> Iterator[str]:
        names = self._unpacked()
        if names:
            yield f"({', '.join(names)},) = arguments"
        for point, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                yield from self._compute(self.parts.units[index], point)
                dead = [name for number in self.dead.get(point, ()) for name in self.names[number]]
                if dead:
                    yield f"del {', '.join(dead)}"
                continue
            number = self.numbers[index]
            names = list(self.names[number])
            if not names:
                continue
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

    def _storage_names(self) -> list[tuple[str, ...]]:
        counts = [len(storage.layouts) for storage in self.parts.storages]
        return [
            tuple(f"t{k}_{index}" for index in range(count)) if count > 1 else (f"t{k}",)
            for k, count in enumerate(counts)
        ]

    def _unpacked(self) -> list[str]:
        """Return the names of the arguments, in their order."""
        return list(self.arguments.values())

    def _compute(self, unit: Unit, point: int) -> Iterator[str]:
        first = unit.index not in self.computed
        self.computed.add(unit.index)
        saves = unit.random and self.count[unit.index] > 1
        yield from self._views(unit.reads)
        if saves and first:
            yield f"g{unit.index} = get_state()"
        elif saves:
            yield "now = get_state()"
            yield f"set_state(g{unit.index})"
        outputs = {
            layout.position: name
            for number in unit.storages
            if first or number in self.scheduled
            for name, layout in zip(
                self.names[number], self.parts.storages[number].layouts, strict=True
            )
        }
        result = outputs.get(None, "r")
        yield f"{result} = {self._call(unit.node, self._kernel(unit, point))}"
        if saves and not first:
            yield "set_state(now)"
            yield "del now"
        for position, name in outputs.items():
            if position is not None:
                yield f"{name} = r[{position}]"
        rest = [*(["r"] if result == "r" else []), *map(view_name, unit.reads.views)]
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
            yield f"del {', '.join(map(view_name, emission.reads.views))}"

    def _kernel(self, unit: Unit, point: int) -> Any:
        """Return the function for the computation of a unit at a point of the program."""
        del point
        return kernel_of(unit.node)

    def _dead(self) -> dict[int, list[int]]:
        """Return kept storages, by the point of the last computation that touches them."""
        last: dict[int, int] = {}
        for point, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                unit = self.parts.units[index]
                touched = (*unit.reads.storages, *unit.storages)
                last.update((number, point) for number in touched if number not in self.scheduled)
        dead: dict[int, list[int]] = {}
        for number, point in last.items():
            dead.setdefault(point, []).append(number)
        return dead

    def _views(self, reads: Reading) -> Iterator[str]:
        for view in reads.views:
            yield f"{view_name(view)} = {self._call(view, kernel_of(view))}"

    def _call(self, node: fx.Node, kernel: Any) -> str:
        words = [self._word(argument) for argument in node.args]
        words += [f"{key}={self._word(value)}" for key, value in node.kwargs.items()]
        return f"{self._constant(kernel)}({', '.join(words)})"

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
            number, index = self.parts.direct[node]
            return self.names[number][index]
        return view_name(node)

    def _is_whole(self, node: fx.Node) -> bool:
        """Return whether a node's value is all there is in its storage."""
        if node not in self.parts.direct:
            return False
        number, index = self.parts.direct[node]
        storage = self.parts.storages[number]
        layout = storage.layouts[index]
        return bool(math.prod(layout.shape) * layout.dtype.itemsize == storage.bytes)

    def _constant(self, value: Any) -> str:
        """Return the name of a value that no source can spell."""
        name = self.constant_names.setdefault(id(value), f"c{len(self.constant_names)}")
        self.constants[name] = value
        return name


def view_name(node: fx.Node) -> str:
    """Return the name of the value of a view."""
    return f"v_{node.name}"
