"""The program of a plan as Python source: straight down, one line for each thing to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.plan import Op
from poetmodel.torch.interpreter import kernel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from poetmodel.plan import Program
    from poetmodel.torch.pages import Pages
    from poetmodel.torch.tracing import Trace
    from poetmodel.torch.units import Emission, Reading, TensorStorage, Unit

    Emit = Callable[[int, torch.Tensor], None]
    Function = Callable[[Sequence[Any], Emit, Pages | None], Sequence[torch.Tensor]]

_NAME: Final = "step"
_INDENT: Final = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A compiled program."""

    source: str
    """What is run, for people to read."""
    function: Function
    """Takes the values of the arguments, what is called with each gradient, and the pages; returns
    the results of `held`."""
    held: tuple[Emission, ...]
    """What it returns: the loss, and the new values of buffers."""


def generate(trace: Trace, program: Program, numbers: Sequence[int]) -> Generated:
    """Turn a program into Python, and compile it.

    Operations that draw random numbers and are recomputed do so from the state that they began with
    the first time.

    Parameters
    ----------
    trace : Trace
        The captured step.
    program : sequence of Instruction
        What to do; a valid plan of the graph that has the tensors `numbers`.
    numbers : sequence of int
        For each tensor of the program the number of its storage; all other storages are kept as
        long as anything reads them.
    """
    writer = _Writer(trace, program, numbers)
    source = "\n".join(writer.lines())
    code = compile(source, f"<poetmodel step of {trace.graph.name}>", "exec")
    exec(code, writer.constants)  # noqa: S102 - the source is made here, of nothing but numbers
    return Generated(
        source=source, function=writer.constants[_NAME], held=tuple(writer.held.values())
    )


class _Writer:
    """Writes the program line by line."""

    def __init__(self, trace: Trace, program: Program, numbers: Sequence[int]) -> None:
        self.parts = trace.parts
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
        again = [step.index for step in program if step.op == Op.COMPUTE]
        self.repeated = {k for k in again if again.count(k) > 1}
        self.computed: set[int] = set()
        self.last_use = self._last_uses()

    # -- lines -------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """Yield the source."""
        yield f"def {_NAME}(arguments, emit, pages):"
        for line in self._body():
            yield f"{_INDENT}{line}"

    def _body(self) -> Iterator[str]:
        if self.arguments:
            yield f"({', '.join(self.arguments.values())},) = arguments"
        for place, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                yield from self._compute(self.parts.units[index])
                yield from self._let_go(place)
                continue
            number = self.numbers[index]
            names = self._names(self.parts.storages[number])
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
        saves = unit.random and unit.index in self.repeated
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
                self._names(self.parts.storages[number]),
                self.parts.storages[number].layouts,
                strict=True,
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
        rest = (*(("r",) if result == "r" else ()), *_view_names(unit.reads))
        if rest:
            yield "del " + ", ".join(rest)
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
            yield "del " + ", ".join(_view_names(emission.reads))

    def _let_go(self, place: int) -> Iterator[str]:
        """Let go kept storages after the last computation that touches them."""
        names = [
            name
            for number, last in self.last_use.items()
            if last == place
            for name in self._names(self.parts.storages[number])
        ]
        if names:
            yield f"del {', '.join(names)}"

    def _last_uses(self) -> Mapping[int, int]:
        """Return for each kept storage the place of the last computation that touches it."""
        last: dict[int, int] = {}
        for place, (op, index) in enumerate(self.program):
            if op == Op.COMPUTE:
                unit = self.parts.units[index]
                touched = (*unit.reads.storages, *unit.storages)
                last.update((number, place) for number in touched if number not in self.scheduled)
        return last

    # -- expressions -------------------------------------------------------------------------

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
            return self._names(self.parts.storages[number])[place]
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

    def _names(self, storage: TensorStorage) -> tuple[str, ...]:
        """Return the names of the tensors in a storage."""
        if len(storage.layouts) == 1:
            return (f"t{storage.index}",)
        return tuple(f"t{storage.index}_{place}" for place in range(len(storage.layouts)))


def _view_name(node: fx.Node) -> str:
    return f"v_{node.name}"


def _view_names(reads: Reading) -> tuple[str, ...]:
    return tuple(_view_name(view) for view in reads.views)
