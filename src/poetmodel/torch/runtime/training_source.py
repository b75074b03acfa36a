"""The source of a whole training step: state is updated where it is, operators run in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.graph import Phase
from poetmodel.plan import Op
from poetmodel.torch.runtime.source import Generated, view_name
from poetmodel.torch.step.in_place import kernel_in_place, place_of
from poetmodel.torch.step.updates import ParameterUpdate, Update

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from poetmodel.plan import Program
    from poetmodel.torch.step.trace import Trace
    from poetmodel.torch.step.training_units import TrainingUnits
    from poetmodel.torch.step.units import TensorStorage, Unit, Units


class TrainingGenerated(Generated):
    """A program whose units are state, inputs and updates too.

    State whose home is RAM is there throughout: to compute it is to do nothing. State on storage is
    read into memory of its own where the program says so, updated there, and written back. An
    operator that may run in place does so where the program lets its input go right after it.
    `resident` are the state tensors of the graph of the program whose home is RAM.
    """

    parts: TrainingUnits

    def __init__(
        self, trace: Trace, program: Program, numbers: Sequence[int], *, resident: Collection[int]
    ) -> None:
        new, state = trace.graph.replacement_of, set(trace.graph.state_tensors)
        away = {number for i, number in enumerate(numbers) if i not in resident} & state
        homes = {number: number for number in sorted(away)}
        homes |= {new[number]: number for number in sorted(away) if number in new}
        super().__init__(trace, program, numbers, homes=homes)

    def _storage_names(self) -> list[tuple[str, ...]]:
        """Return the names of tensors: those of arguments for inputs and for state on storage.

        State in RAM has none.
        """
        names = super()._storage_names()
        own: dict[tuple[int, int], str] = {}
        for node, name in self.arguments.items():
            if node in self.parts.direct:
                self.arguments[node] = own.setdefault(self.parts.direct[node], name)
        for storage in self.parts.storages:
            home = self.parts.storages[self.homes.get(storage.index, storage.index)]
            if _is_state(self.parts, storage) and storage.index not in self.homes:
                names[storage.index] = ()
            elif self.parts.units[home.unit].is_source:
                places = range(len(home.layouts))
                names[storage.index] = tuple(own[home.index, index] for index in places)
        return names

    def _lines(self) -> Iterator[str]:
        """Yield the program, after what hands out state as it is before the step."""
        lines = super()._lines()
        yield next(lines)
        for unit in self.parts.units:
            for number in self.emissions.get(unit.index, ()) if unit.is_source else ():
                yield from self._emit(number)
        yield from lines

    def _unpacked(self) -> list[str]:
        return [*(f"a{k}" for k in range(len(self.arguments))), "new"]

    def _compute(self, unit: Unit, point: int) -> Iterator[str]:
        if unit.is_source:
            for number in unit.storages:
                if number in self.homes:
                    yield f"{', '.join(self.names[number])} = pages.into({number})"
            return
        if isinstance(unit.node.target, Update):
            yield from self._update(unit, unit.node.target, point)
        else:
            yield from super()._compute(unit, point)

    def _update(self, unit: Unit, update: Update, point: int) -> Iterator[str]:
        state, *others = unit.node.args
        words = [self._word(value) for value in (state, *others)]
        if isinstance(update, ParameterUpdate):
            gradient = set(self.parts.gradient_storages(unit))
            owned = self.parts.owns_gradient(unit) and gradient <= self._dying(point)
            words.append(f"owned={owned}")
            if update.rule.moments:
                moment: Any = state[1]
                words.append(f"first={self._unpacked().index(self._word(moment))} in new")
        yield from self._views(unit.reads)
        yield f"{self._constant(update.replace)}({', '.join(words)})"
        if unit.reads.views:
            yield f"del {', '.join(map(view_name, unit.reads.views))}"

    def _kernel(self, unit: Unit, point: int) -> Any:
        dying = self._dying(point) if unit.in_place else ()
        for _, read in unit.in_place:
            if read in dying:
                return kernel_in_place(unit.node, place_of(self.parts, unit, read))
        return super()._kernel(unit, point)

    def _dying(self, point: int) -> set[int]:
        """Return the storages that the program lets go right after a computation."""
        dying = set(self.dead.get(point, ()))
        for op, i in self.program[point + 1 :]:
            if op != Op.FREE:
                break
            dying.add(self.numbers[i])
        return dying

    def _emit(self, number: int) -> Iterator[str]:
        """Yield what hands out a result; what is state is copied before it is updated."""
        emission = self.parts.emissions[number]
        sources = (self.parts.units[self.parts.storages[i].unit] for i in emission.reads.storages)
        if not any(source.is_source for source in sources):
            yield from super()._emit(number)
            return
        yield from self._views(emission.reads)
        yield f"h{number} = {self._value(emission.result.node)}.clone()"


def _is_state(parts: Units, storage: TensorStorage) -> bool:
    """Return whether a storage is state, or replaces it."""
    return storage.replaces is not None or parts.units[storage.unit].phase is Phase.STATE
