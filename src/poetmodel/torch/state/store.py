"""Homes of state: parameters, buffers and moments between steps, in RAM or in a state file.

A tensor with its home on storage is a mapping of the file. `state_dict`, optimizers and other code
read and write it like any tensor. With two generations, tensors with their home in RAM that a step
updates or other code changes are also written to the file, so that it has the complete state.
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
from poetmodel.torch.state.memory import Memory
from poetmodel.torch.state.pages import allocate_page, bytes_of, checksum
from poetmodel.torch.state.recovery import replace_recovered_file
from poetmodel.torch.step.optimizers import (
    OptimizerMoment,
    read_update_counts,
    set_update_counts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from poetmodel.torch.step.trace import Trace

_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateEntry:
    """A state tensor with access to its value in the model or optimizer."""

    tensor: StateTensor
    find: Callable[[], torch.Tensor]
    """Returns the current tensor; for an absent moment its initial value, in new memory."""
    moment: OptimizerMoment | None = None
    """Access to a moment in the optimizer; None for parameters and buffers."""
    is_updated: bool = False
    """Whether a step updates the tensor."""

    @property
    def index(self) -> int:
        return self.tensor.storage.index

    @property
    def is_absent(self) -> bool:
        """Whether the tensor is a moment that the optimizer has no value for yet."""
        return self.moment is not None and self.moment.is_new

    def read_content(self) -> tuple[memoryview, Any]:
        """Return (bytes of the tensor in the file's layout, tensor that owns these bytes)."""
        value, storage = self.find().detach(), self.tensor.storage
        layout = storage.layouts[0]
        has_layout = value.storage_offset() == layout.offset and value.stride() == layout.stride
        if not has_layout or value.untyped_storage().nbytes() != storage.bytes:
            _, copies = allocate_page(storage)
            buffer: torch.Tensor = copies[0] if isinstance(copies, tuple) else copies
            value = buffer.copy_(value)
        return bytes_of(value.untyped_storage()), value

    def bind(self, memory: Memory) -> None:
        """Make the tensor in the model or optimizer use this memory, with the memory's content.

        A moment, also an absent one, is stored in the optimizer as a new tensor.
        """
        layout = self.tensor.storage.layouts[0]
        empty = torch.empty(0, dtype=layout.dtype)
        value = empty.set_(memory.storage, layout.offset, layout.shape, layout.stride)
        if self.moment is None:
            self.find().data = value
        else:
            self.moment.store(value)


class StateStore:
    """The state of a step with an optimizer: in RAM, or for `stored_indices` in a file in `folder`.

    Tensors are identified by the indices of their storages in `trace`; parameters and buffers that
    the step does not read have higher indices. Those of `stored_indices` have their home on
    storage. With `rollback`, the file in `folder` has two generations of all state, so that the
    last complete one remains if a step fails or the process is killed, and replaces the file from
    which the model was recovered. `close`, deletion of the
    object, or normal exit of the process removes the file.
    """

    def __init__(
        self, trace: Trace, stored_indices: Collection[int], *, folder: str | Path, rollback: bool
    ) -> None:
        self._states = {state.index: state for state in _all_states(trace)}
        self._memories: dict[int, Memory] = {}
        self._stored_indices: frozenset[int] = frozenset()
        self._is_trial = False
        self.mirrored_bytes = 0
        """Bytes of state with its home in RAM that `commit` has written to the file so far [B]."""
        model = trace.joint.module.get_submodule(BODY)
        self._optimizer = trace.joint.optimizer
        with replace_recovered_file(folder, model, removes=rollback) as steps:
            self.file = StateFile(
                folder,
                (state.tensor for state in self._states.values()),
                name=trace.joint.name,
                generations=2 if rollback else 1,
                steps=steps,
                read_update_counts=partial(read_update_counts, self._optimizer),
            )
            try:
                if rollback:
                    for state in self._states.values():
                        if not state.is_absent:
                            self._write(state)
                    self.file.commit()
                self._set_homes(frozenset(stored_indices))
            except BaseException:
                self.file.close()
                raise
        weakref.finalize(self, _close_ignoring_errors, self.file).atexit = False

    @property
    def has_two_generations(self) -> bool:
        """Whether the file has two generations."""
        return self.file.format.generations > 1

    def map_indices(self, trace: Trace) -> Mapping[int, int]:
        """Return the index in this store of each state tensor in `trace`, by its index in `trace`.

        `trace` is the same step, perhaps with inputs of other shapes.
        """
        index_by_identity = {
            _identity(state.tensor): index for index, state in self._states.items()
        }
        store_indices = {}
        for state in _step_states(trace):
            index = index_by_identity.get(_identity(state.tensor))
            if index is None:
                raise CaptureError(
                    f"{trace.joint.name}: {state.tensor.storage.name} is updated with these "
                    "inputs, but not with the first ones; compile with such inputs first"
                )
            store_indices[state.index] = index
        return store_indices

    # -- around a step ---------------------------------------------------------------------------

    def prepare_step(self, stored_indices: Collection[int] | None = None) -> None:
        """Commit changes since the last step, then set homes unless `stored_indices` is None.

        With one generation, only state on storage is committed. A moment ``sum`` that the optimizer
        lacks is stored there first, because a step adds to it. A `trial` discards the last step's
        results instead.
        """
        self.file.check()
        if self._is_trial:
            self.file.rollback()
            return
        for state in self._states.values():
            if state.moment is not None and state.is_absent and state.moment.key == "sum":
                state.moment.store(state.find())  # the first step adds to this sum
        try:
            self._update_file()
        except BaseException:
            self.file.discard_written()  # with two generations, the next call writes them again
            raise
        if stored_indices is not None and self._stored_indices != frozenset(stored_indices):
            self._set_homes(frozenset(stored_indices))

    def _update_file(self) -> None:
        """Write values of state that have changed to the file, and commit if there are changes.

        Finally binds tensors with their home on storage that are new or that the user has replaced.
        """
        absent_indices, replaced_states = [], []
        for index, state in self._states.items():
            memory = self._memories.get(index)
            if state.is_absent:
                self._untrack(index)
                if self.file.contains(index):
                    absent_indices.append(index)
            elif index in self._stored_indices:
                is_bound = memory is not None and memory.is_memory_of(state.find())
                if not (is_bound and self.file.contains(index)):
                    # A new moment, or the user replaced the tensor: `optimizer.load_state_dict` or
                    # ``.data = ...``.
                    self._write(state)
                    replaced_states.append(state)
            elif self.has_two_generations:
                data, value = state.read_content()
                if not self.file.has_checksum(index, checksum(data)):
                    self._write(state)
                del data, value
        self.file.write_mapped_changes()
        if self.file.is_changed or absent_indices:
            self.file.commit(absent_indices=absent_indices)
        for state in replaced_states:
            self._bind(state)
        self._bind_unmapped()

    def commit(self, *, steps: int = 1) -> None:
        """Commit the tensors that a step has written; add `steps` to the file's count of steps.

        With two generations, updated state in RAM is written to the file, too. In a `trial`,
        mappings show the written tensors until the next step instead.
        """
        if self.has_two_generations:
            for index, state in self._states.items():
                if state.is_updated and index not in self._stored_indices and not state.is_absent:
                    self._write(state)
                    self.mirrored_bytes += state.tensor.storage.bytes
        if self._is_trial:
            self.file.show_uncommitted()
        else:
            self.file.commit(steps=steps)
        self._bind_unmapped()

    def rollback(self) -> None:
        """Restore the state that steps update to its values at the last commit.

        With one generation, no value is restored, and state remains partly updated.
        """
        self.file.rollback()
        if not self.has_two_generations:
            return
        set_update_counts(self._optimizer, self.file.record.update_counts)
        for index, state in self._states.items():
            if not state.is_updated or index in self._stored_indices:
                continue
            if not self.file.contains(index):
                if state.moment is not None:
                    state.moment.remove()
                continue
            value = state.find()
            page_memory, stored_tensors = allocate_page(state.tensor.storage)
            self.file.read(index, bytes_of(page_memory))
            stored_value: torch.Tensor = (
                stored_tensors[0] if isinstance(stored_tensors, tuple) else stored_tensors
            )
            value.data.copy_(stored_value)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Let trial steps show their results without a commit; restore state on storage at the end.

        The caller restores state in RAM before the end. With one generation, steps change the file.
        """
        self.prepare_step()
        if not self.has_two_generations:
            yield
            return
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial = False
            self.file.rollback()
            self._update_file()

    def close(self) -> None:
        """Move all state to RAM, and remove the file; in a forked process, only stop using it."""
        self.file.close()
        self._stored_indices = frozenset()

    # -- homes -----------------------------------------------------------------------------------

    def _set_homes(self, stored_indices: frozenset[int]) -> None:
        """Map the tensors with their home on storage to the file; move other ones to RAM.

        With one generation, newly stored values are first written and committed. With two, the file
        must contain them already.
        """
        for index in self._stored_indices - stored_indices:
            if self.file.contains(index):
                self.file.unmap(index)
        added_states = [
            self._states[index] for index in sorted(stored_indices - self._stored_indices)
        ]
        self._stored_indices = stored_indices
        if not self.has_two_generations:
            for state in added_states:
                if not state.is_absent:
                    self._write(state)
            self.file.commit()
        self._bind_unmapped()

    def _bind_unmapped(self) -> None:
        """Bind tensors with their home on storage that are in the file, but not mapped yet."""
        for index in self._stored_indices:
            if not self.file.is_tracked(index) and self.file.contains(index):
                self._bind(self._states[index])

    def _bind(self, state: _StateEntry) -> None:
        """Map memory copy-on-write to a tensor's value in the file, and make the tensor use it.

        The tensor's value in RAM is lost; commits map the memory again to new values.
        """
        index = state.index
        if index not in self._memories or self._memories[index].is_lost:
            self._memories[index] = Memory(state.tensor.storage.bytes)
        memory = self._memories[index]
        self.file.map(index, memory)
        if state.is_absent or not memory.is_memory_of(state.find()):
            state.bind(memory)

    def _untrack(self, index: int) -> None:
        """Forget the memory of a tensor: commits do not map it again."""
        self._memories.pop(index, None)
        self.file.untrack(index)

    def _write(self, state: _StateEntry) -> None:
        """Write the current value of a tensor to the file, for the next commit."""
        data, value = state.read_content()
        self.file.write(state.index, data)
        del data, value


def _close_ignoring_errors(file: StateFile) -> None:
    """Close a file when its store is deleted; the file remains if a tensor cannot move to RAM."""
    with suppress(PageError, OSError):
        file.close()


# -- state tensors of a step --------------------------------------------------------------------


def _identity(tensor: StateTensor) -> tuple[str, str, str]:
    return tensor.kind, tensor.owner, tensor.key


def _all_states(trace: Trace) -> Iterator[_StateEntry]:
    """Yield the state that a step reads, then its modules' other CPU parameters and buffers."""
    states = list(_step_states(trace))
    yield from states
    module = trace.joint.module
    seen_storages = {storage_key(state.find()) for state in states if state.moment is None}
    named_tensors_of_kind = {
        InputKind.PARAMETER: module.named_parameters,
        InputKind.BUFFER: module.named_buffers,
    }
    index = len(trace.step_graph.storages)
    for kind, named_tensors in named_tensors_of_kind.items():
        for path, value in named_tensors():
            if (
                storage_key(value) in seen_storages
                or value.device.type != "cpu"
                or not value.nbytes
            ):
                continue
            seen_storages.add(storage_key(value))
            storage = TensorStorage(
                index=index,
                name=path.removeprefix(f"{BODY}."),
                operation=index,
                bytes=value.untyped_storage().nbytes(),
                layouts=(TensorLayout.from_tensor(value),),
            )
            tensor = StateTensor(storage=storage, kind=str(kind), owner=path)
            yield _StateEntry(tensor=tensor, find=partial(attrgetter(path), module))
            index += 1


def _step_states(trace: Trace) -> Iterator[_StateEntry]:
    """Yield the state tensors that a step reads, one per storage, in the order of its arguments."""
    joint, storages = trace.joint, trace.step_graph.storages
    replaced_indices = {storage.replaces for storage in storages}
    first_paths: dict[int, str] = {}
    seen_indices = set()
    for argument in joint.arguments:
        if argument.kind not in _STATE_KINDS or argument.node not in trace.step_graph.output_keys:
            continue
        index, _ = trace.step_graph.output_keys[argument.node]
        moment = (
            argument.optimizer_value
            if isinstance(argument.optimizer_value, OptimizerMoment)
            else None
        )
        find = partial(joint.value, argument) if moment is None else moment.value
        if moment is None:
            first_paths.setdefault(id(find()), argument.target)
        if index in seen_indices or not storages[index].bytes:
            continue
        seen_indices.add(index)
        tensor = StateTensor(
            storage=storages[index],
            kind=str(argument.kind),
            owner=argument.target if moment is None else first_paths[id(moment.parameter)],
            key="" if moment is None else moment.key,
        )
        yield _StateEntry(
            tensor=tensor, find=find, moment=moment, is_updated=index in replaced_indices
        )
