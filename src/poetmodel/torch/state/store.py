"""Homes: where parameters, buffers and moments are between steps, in RAM or in a state file.

A tensor that has its home on storage is a mapping of the file, which `state_dict`, optimizers and
everything else read and write as any tensor. What has its home in RAM is copied to the file with
each step, so that the file has the whole state.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.capturing.joint_graph import BODY, InputKind
from poetmodel.torch.errors import CaptureError, PageError
from poetmodel.torch.graph.profiles import TensorLayout
from poetmodel.torch.graph.step_graph import TensorStorage
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.state.file import StateFile, StateTensor
from poetmodel.torch.state.pages import Memory, blank, bytes_of, checksum
from poetmodel.torch.state.recovery import replaced_by
from poetmodel.torch.step.optimizers import OptimizerSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from poetmodel.torch.step.trace import Trace

_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """A tensor of the state, and how to get at it in the model or in the optimizer."""

    tensor: StateTensor
    find: Callable[[], torch.Tensor]
    """Returns what there is now, or what is there before the first step."""
    moment: OptimizerSlot | None = None
    is_updated: bool = False
    """Whether a step gives it a new value."""

    @property
    def index(self) -> int:
        return self.tensor.storage.index

    @property
    def is_absent(self) -> bool:
        """Whether no step has made it yet."""
        return self.moment is not None and self.moment.is_new

    def bytes(self) -> tuple[memoryview, Any]:
        """Return the memory of the value as the file has it, and what must live as long."""
        value, storage = self.find().detach(), self.tensor.storage
        layout = storage.layouts[0]
        same = value.storage_offset() == layout.offset and value.stride() == layout.stride
        if not same or value.untyped_storage().nbytes() != storage.bytes:
            _, copied = blank(storage)
            first: torch.Tensor = copied[0] if isinstance(copied, tuple) else copied
            value = first.copy_(value)
        return bytes_of(value.untyped_storage()), value

    def bind(self, memory: Memory) -> None:
        """Let it lie in some memory."""
        layout = self.tensor.storage.layouts[0]
        empty = torch.empty(0, dtype=layout.dtype)
        value = empty.set_(memory.storage, layout.offset, layout.shape, layout.stride)
        if self.moment is None:
            self.find().data = value
        else:
            self.moment.store(value)


class StateStore:
    """The state of a captured step with an optimizer, in RAM and in a file.

    Tensors go by the numbers of their storages in `trace`. With `rollback` the file has two
    generations of all state: a step that fails, and a process that is killed, leave the one before.

    Parameters
    ----------
    trace : Trace
    on_storage : collection of int
        What has its home on storage; it lies in the file from now on.
    folder : str or Path
    rollback : bool
    """

    def __init__(
        self, trace: Trace, on_storage: Collection[int], *, folder: str | Path, rollback: bool
    ) -> None:
        self._states = {state.index: state for state in _states(trace)}
        self._memories: dict[int, Memory] = {}
        self._on_storage: frozenset[int] = frozenset()
        self._trial = False
        self.mirrored_bytes = 0
        """Written bytes of state that is in RAM [B]."""
        model = trace.joint.module.get_submodule(BODY)
        with replaced_by(folder, model) as steps:
            self.file = StateFile(
                folder,
                (state.tensor for state in self._states.values()),
                name=trace.joint.name,
                generations=2 if rollback else 1,
                steps=steps,
            )
            try:
                for state in self._states.values():
                    if not state.is_absent and (rollback or state.index in on_storage):
                        self._write(state)
                self.file.commit()
            except BaseException:
                self.file.close()
                raise
        weakref.finalize(self, _close, self.file).atexit = False
        self._settle(frozenset(on_storage))

    @property
    def has_two(self) -> bool:
        """Whether the file has two generations."""
        return self.file.format.generations > 1

    def view(self, trace: Trace) -> Mapping[int, int]:
        """Return the number here of each state tensor of the same step with other inputs."""
        own = {_identity(state.tensor): index for index, state in self._states.items()}
        numbers = {}
        for state in _of_step(trace):
            index = own.get(_identity(state.tensor))
            if index is None:
                raise CaptureError(
                    f"{trace.joint.name}: {state.tensor.storage.name} is updated with these inputs "
                    "and was not with the first ones; compile with such inputs first"
                )
            numbers[state.index] = index
        return numbers

    # -- around a step ---------------------------------------------------------------------------

    def begin(self, on_storage: Collection[int] | None = None) -> None:
        """Take over what was changed since the last step, before the next one.

        `on_storage` is what has its home on storage from now on; by default what had it.
        """
        self.file.check()
        if self._trial:
            self.file.rollback()
            return
        for state in self._states.values():
            if state.moment is not None and state.is_absent and state.moment.key == "sum":
                state.moment.store(state.find())  # a first step adds to it
        try:
            self._take_over()
        except BaseException:
            self.file.drop_written()  # and what was changed stays to be taken over
            raise
        if on_storage is not None and self._on_storage != frozenset(on_storage):
            self._settle(frozenset(on_storage))

    def _take_over(self) -> None:
        """Let the file have all state as it is."""
        absent, replaced = [], []
        for index, state in self._states.items():
            memory = self._memories.get(index)
            if state.is_absent:
                self._forget(index)
                if self.file.contains(index):
                    absent.append(index)
            elif index in self._on_storage:
                bound = memory is not None and memory.holds(state.find())
                if not (bound and self.file.contains(index)):
                    # Another tensor, by `optimizer.load_state_dict` or ``.data = ...``.
                    self._write(state)
                    replaced.append(state)
            elif self.has_two:
                held, value = state.bytes()
                if not self.file.has(index, checksum(held)):
                    self._write(state)
                del held, value
        self.file.take_over()
        if self.file.is_changed or absent:
            self.file.commit(absent=absent)
        for state in replaced:
            self._bind(state)
        self._map_new()

    def commit(self, *, steps: int = 1) -> None:
        """Make what a step left the state, for good; what it made new is in the optimizer."""
        if self.has_two:
            for index, state in self._states.items():
                if state.is_updated and index not in self._on_storage and not state.is_absent:
                    self._write(state)
                    self.mirrored_bytes += state.tensor.storage.bytes
        if self._trial:
            self.file.show()
        else:
            self.file.commit(steps=steps)
        self._map_new()

    def rollback(self) -> None:
        """Put back the state of before a step that failed; with one generation it stays torn."""
        self.file.rollback()
        if not self.has_two:
            return
        for index, state in self._states.items():
            if not state.is_updated or index in self._on_storage:
                continue
            if not self.file.contains(index):
                if state.moment is not None:
                    state.moment.remove()
                continue
            value = state.find()
            held, copied = blank(state.tensor.storage)
            self.file.read(index, bytes_of(held))
            first: torch.Tensor = copied[0] if isinstance(copied, tuple) else copied
            value.data.copy_(first)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Run steps whose results are seen, and which are none: the state of before is kept.

        Each step begins with that state. Who runs them puts back what is in RAM, before this ends.
        """
        self.begin()
        if not self.has_two:
            yield
            return
        self._trial = True
        try:
            yield
        finally:
            self._trial = False
            self.file.rollback()
            self._take_over()

    def close(self) -> None:
        """Bring all state to RAM, and remove the file."""
        self.file.close()
        self._on_storage = frozenset()

    # -- homes -----------------------------------------------------------------------------------

    def _settle(self, on_storage: frozenset[int]) -> None:
        """Let exactly these have their homes on storage; the file has what is in RAM."""
        for index in self._on_storage - on_storage:
            if self.file.contains(index):
                self.file.unmap(index)
        coming = [self._states[index] for index in sorted(on_storage - self._on_storage)]
        self._on_storage = on_storage
        if not self.has_two:
            for state in coming:
                if not state.is_absent:
                    self._write(state)
            self.file.commit()
        self._map_new()

    def _map_new(self) -> None:
        """Bind what has its home on storage and is not there yet."""
        for index in self._on_storage:
            if not self.file.is_mapped(index) and self.file.contains(index):
                self._bind(self._states[index])

    def _bind(self, state: _State) -> None:
        index = state.index
        if index not in self._memories or self._memories[index].is_lost:
            self._memories[index] = Memory(state.tensor.storage.bytes)
        memory = self._memories[index]
        self.file.map(index, memory)
        if state.is_absent or not memory.holds(state.find()):
            state.bind(memory)

    def _forget(self, index: int) -> None:
        self._memories.pop(index, None)
        self.file.forget(index)

    def _write(self, state: _State) -> None:
        held, value = state.bytes()
        self.file.write(state.index, held)
        del held, value


def _close(file: StateFile) -> None:
    """Bring state back to RAM when a step is forgotten; what cannot be read stays mapped."""
    with suppress(PageError, OSError):
        file.close()


# -- what is state -----------------------------------------------------------------------------


def _identity(tensor: StateTensor) -> tuple[str, str, str]:
    return tensor.kind, tensor.owner, tensor.key


def _states(trace: Trace) -> Iterator[_State]:
    """Yield the state of a step, and then what of the model the step does not read."""
    states = list(_of_step(trace))
    yield from states
    module = trace.joint.module
    seen = {storage_key(state.find()) for state in states if state.moment is None}
    kinds = {InputKind.PARAMETER: module.named_parameters, InputKind.BUFFER: module.named_buffers}
    index = len(trace.step_graph.storages)
    for kind, named in kinds.items():
        for path, value in named():
            if storage_key(value) in seen or value.device.type != "cpu" or not value.nbytes:
                continue
            seen.add(storage_key(value))
            storage = TensorStorage(
                index=index,
                name=path.removeprefix(f"{BODY}."),
                operation=index,
                bytes=value.untyped_storage().nbytes(),
                layouts=(TensorLayout.from_tensor(value),),
            )
            tensor = StateTensor(storage=storage, kind=str(kind), owner=path)
            yield _State(tensor=tensor, find=partial(attrgetter(path), module))
            index += 1


def _of_step(trace: Trace) -> Iterator[_State]:
    """Yield the state that a step reads; of what has several names the first."""
    joint, storages = trace.joint, trace.step_graph.storages
    updated = {storage.replaces for storage in storages}
    paths: dict[int, str] = {}
    seen = set()
    for argument in joint.arguments:
        if argument.kind not in _STATE or argument.node not in trace.step_graph.output_keys:
            continue
        index, _ = trace.step_graph.output_keys[argument.node]
        moment = (
            argument.optimizer_value
            if isinstance(argument.optimizer_value, OptimizerSlot)
            else None
        )
        find = partial(joint.value, argument) if moment is None else moment.value
        if moment is None:
            paths.setdefault(id(find()), argument.target)
        if index in seen or not storages[index].bytes:
            continue
        seen.add(index)
        tensor = StateTensor(
            storage=storages[index],
            kind=str(argument.kind),
            owner=argument.target if moment is None else paths[id(moment.parameter)],
            key="" if moment is None else moment.key,
        )
        yield _State(tensor=tensor, find=find, moment=moment, is_updated=index in updated)
