"""The units of a whole training step: state and inputs too, and each update at its place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.graph import Phase
from poetmodel.torch.capturing.replay import storage_key
from poetmodel.torch.capturing.signature import InputKind, InputSpec, Joint
from poetmodel.torch.step.in_place import pair_in_place, workspace_in_place_bytes
from poetmodel.torch.step.units import Made, Reading, TensorLayout, TensorStorage, Unit, Units
from poetmodel.torch.step.updates import BufferUpdate, CustomOperation, ParameterUpdate, Update

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import fx

_INPUTS = (InputKind.USER_INPUT, InputKind.LEARNING_RATE)
_NUMBERS_BYTES: Final = 16
"""Scalars of an update, if any: a factor in double, and in the type of a tensor."""


class TrainingUnits(Units):
    """The units of a captured step that ends with the updates of an optimizer.

    Parameters, moments, buffers and constants that the step reads are state, each a unit of its own
    in front of its first reader; so are the inputs of the step. The update of a parameter comes as
    soon as its gradient is there and nothing else reads the parameter. Buffers get new values once
    nothing reads what their readers make: until then these may be recomputed, as batch norm.
    """

    def __init__(
        self, joint: Joint, *, known: Mapping[int, Made] | None = None, measured: bool = True
    ) -> None:
        self._fits: dict[fx.Node, tuple[bool, bool]] = {}
        """Whether the gradient of each update has the parameter's layout, and fills its memory."""
        self.last: tuple[int, ...] = ()
        """For each storage the last unit that makes or reads it."""
        super().__init__(joint, known=known, measured=measured)

    def _begin(self) -> None:
        """Add a unit for each storage that is there before the step."""
        numbers: dict[int, int] = {}
        values = list(map(self._joint.value, self._joint.arguments))  # held: keys are of the living
        for argument, value in zip(self._joint.arguments, values, strict=True):
            if argument.kind is InputKind.TANGENT or not isinstance(value, torch.Tensor):
                continue
            number = numbers.setdefault(storage_key(value), len(self.units))
            if number == len(self.units):
                self._add_source(argument, value)
            layouts = self.storages[number].layouts
            if layout_of(value) not in layouts:
                layouts = (*layouts, layout_of(value))
                self.storages[number] = replace(self.storages[number], layouts=layouts)
            self.direct[argument.node] = (number, layouts.index(layout_of(value)))

    def _add_source(self, argument: InputSpec, value: torch.Tensor) -> None:
        number, size = len(self.units), value.untyped_storage().nbytes()
        moment = argument.kind is InputKind.MOMENT
        kind = argument.name.rpartition(".")[2] if moment else str(argument.kind)
        self._seen[argument.name] += 1
        self.storages.append(
            TensorStorage(
                index=number,
                name=argument.name,
                unit=number,
                bytes=size,
                layouts=(layout_of(value),),
            )
        )
        self.units.append(
            Unit(
                index=number,
                name=argument.name,
                op=kind.replace(" ", "_"),
                phase=Phase.INPUT if argument.kind in _INPUTS else Phase.STATE,
                node=argument.node,
                reads=Reading(storages=(), views=()),
                storages=(number,),
                random=False,
                flops=0,
                moved_bytes=0,
            )
        )

    def _label(self, node: fx.Node) -> tuple[str, str, Phase]:
        name, op, phase = super()._label(node)
        return name, op, Phase.UPDATE if isinstance(node.target, CustomOperation) else phase

    def _observe(
        self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any], value: Any
    ) -> Made | None:
        observed = super()._observe(node, arguments, keywords, value)
        if observed is None or not isinstance(node.target, ParameterUpdate):
            return observed
        (parameter, *_), (gradient, *_), *_ = arguments
        whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
        return replace(observed, gradient_fits=(gradient.stride() == parameter.stride(), whole))

    def _add(self, node: fx.Node, observed: Made) -> None:
        super()._add(node, observed)
        if observed.gradient_fits is not None:
            self._fits[node] = observed.gradient_fits

    def _end(self) -> None:
        """Let updates replace state, put all units in order, and find what may be in place."""
        for unit in self.units:
            if isinstance(unit.node.target, Update):
                self._replace_state(unit)
        self._renumber(list(self._in_order()))
        results = (result.node for result in self._joint.results)
        kept = frozenset(self.reading(results).storages)
        self.last = self._last_readers()
        self.units = [
            replace(unit, in_place=pair_in_place(self, unit, self.last, kept))
            for unit in self.units
        ]
        self.units = [
            replace(unit, workspace_bytes=workspace_in_place_bytes(self, unit))
            for unit in self.units
        ]

    def _replace_state(self, unit: Unit) -> None:
        """Let the outputs of an update lie where its state does."""
        state: Any = unit.node.args[0]
        for number, node in zip(unit.storages, state, strict=True):
            replaced, layout_index = self.direct[node]
            old, new = self.storages[replaced], self.storages[number]
            layout = replace(old.layouts[layout_index], position=new.layouts[0].position)
            self.storages[number] = replace(
                new, name=f"{old.name}+", bytes=old.bytes, layouts=(layout,), replaces=replaced
            )
        update: Any = unit.node.target
        rule = update.rule
        if rule is not None:
            elements = math.prod(self.storages[unit.storages[0]].layouts[0].shape)
            flops = rule.flops_per_element * elements
            self.units[unit.index] = replace(unit, flops=flops)

    def gradient_storages(self, unit: Unit) -> tuple[int, ...]:
        """Return in which storages the first gradient of an update lies."""
        gradients: Any = unit.node.args[1]
        return self.reading(gradients[:1]).storages

    def owns_gradient(self, unit: Unit) -> bool:
        """Return whether an update may write in the memory of its gradient, if that dies there."""
        numbers = self.gradient_storages(unit)
        computed = [i for i in numbers if not self.units[self.storages[i].unit].is_source]
        whole = self._fits[unit.node][1] and len(computed) == len(numbers) == 1
        return whole and self.last[computed[0]] == unit.index

    def update_workspace_bytes(self, unit: Unit) -> int:
        """Return the reads of an update beside its gradient: tensors and numbers [B]."""
        update: Any = unit.node.target
        numbers_bytes = min(unit.workspace_bytes, _NUMBERS_BYTES)
        if not isinstance(update, ParameterUpdate):
            return numbers_bytes
        fits, _ = self._fits[unit.node]
        writes = update.writes_gradient(unit.node.args[1:])
        layout = self.storages[unit.storages[0]].layouts[0]
        copied = not fits or (writes and not self.owns_gradient(unit))
        gradient_bytes: int = math.prod(layout.shape) * layout.dtype.itemsize
        return gradient_bytes * (copied + update.rule.needs_scratch) + numbers_bytes

    # -- the order -------------------------------------------------------------------------------

    def _last_readers(self) -> tuple[int, ...]:
        """Return for each storage the last unit that makes or reads it."""
        last = [storage.unit for storage in self.storages]
        for unit in self.units:
            for number in unit.reads.storages:
                last[number] = max(last[number], unit.index)
        return tuple(last)

    def _in_order(self) -> Iterator[Unit]:
        """Yield the units in the order of the training graph, as they are numbered so far."""
        own = {unit.index for unit in self.units if isinstance(unit.node.target, CustomOperation)}
        computed = [unit for unit in self.units if not unit.is_source and unit.index not in own]
        after: dict[int, list[Unit]] = {}
        for index, predecessor in self._predecessors(sorted(own), computed).items():
            after.setdefault(predecessor, []).append(self.units[index])
        there: set[int] = set()
        for unit in computed:
            for scheduled in (unit, *after.get(unit.index, ())):
                makers = {self.storages[i].unit for i in scheduled.reads.storages} - there
                sources = [self.units[k] for k in sorted(makers) if self.units[k].is_source]
                there.update(source.index for source in sources)
                yield from (*sources, scheduled)

    def _predecessors(self, own: Sequence[int], computed: Sequence[Unit]) -> dict[int, int]:
        """Return for each operation that PyTorch has none for the unit that it comes after."""
        last = [storage.unit for storage in self.storages]
        readers: dict[int | None, list[Unit]] = {}
        for unit in computed:
            for number in unit.reads.storages:
                last[number] = unit.index
                readers.setdefault(number, []).append(unit)
        predecessors: dict[int, int] = {}
        for unit in (self.units[k] for k in own):
            made_by = (self.storages[number].unit for number in unit.reads.storages)
            waits = [predecessors.get(k, k) for k in made_by]
            replaced = [self.storages[number].replaces for number in unit.storages]
            for reader in (user for old in replaced for user in readers.get(old, ())):
                waits.append(reader.index)
                if isinstance(unit.node.target, BufferUpdate):
                    waits += [last[number] for number in reader.storages]
            waits += [
                predecessor
                for k, predecessor in predecessors.items()
                if not set(replaced).isdisjoint(self.units[k].reads.storages)
            ]
            predecessors[unit.index] = max(waits)
        return predecessors

    def _renumber(self, order: list[Unit]) -> None:
        """Give units the numbers of another order, and storages likewise; drop all others."""
        units = {unit.index: k for k, unit in enumerate(order)}
        kept = [number for unit in order for number in unit.storages]
        numbers: dict[int | None, int] = {number: k for k, number in enumerate(kept)}
        self.storages = [
            replace(
                self.storages[number],
                index=k,
                unit=units[self.storages[number].unit],
                replaces=numbers.get(self.storages[number].replaces),
            )
            for k, number in enumerate(kept)
        ]
        self.units = [
            replace(
                unit,
                index=k,
                reads=replace(
                    unit.reads, storages=tuple(sorted(numbers[i] for i in unit.reads.storages))
                ),
                storages=tuple(numbers[i] for i in unit.storages),
            )
            for k, unit in enumerate(order)
        ]
        self.direct = {
            node: (numbers[number], layout_index)
            for node, (number, layout_index) in self.direct.items()
            if number in numbers
        }


def layout_of(value: torch.Tensor) -> TensorLayout:
    """Return the layout of a tensor that exists before the step, in its storage."""
    return TensorLayout(
        position=None,
        dtype=value.dtype,
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        offset=value.storage_offset(),
    )
