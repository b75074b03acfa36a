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

from poetmodel.torch.capturing.joint_graph import BODY, InputKind
from poetmodel.torch.errors import CaptureError, PageError
from poetmodel.torch.graph.profiles import TensorLayout
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.state.file import StateFile
from poetmodel.torch.state.format import StateTensor
from poetmodel.torch.state.memory import Memory
from poetmodel.torch.state.pages import bytes_of, checksum
from poetmodel.torch.state.recovery import replace_recovered_file
from poetmodel.torch.step.optimizers import (
    OptimizerMoment,
    read_update_counts,
    set_update_counts,
)
from poetmodel.torch.step.state_keys import StateKey

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    import torch

    from poetmodel.torch.step.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateEntry:
    """A state tensor with access to its value in the model or optimizer."""

    key: StateKey
    tensor: StateTensor
    find: Callable[[], torch.Tensor]
    """Returns the current tensor; for an absent moment its initial value, in new memory."""
    moment: OptimizerMoment | None = None
    """Access to a moment in the optimizer; None for parameters and buffers."""
    is_updated: bool = False
    """Whether a step updates the tensor."""

    @property
    def is_absent(self) -> bool:
        """Whether the tensor is a moment that the optimizer has no value for yet."""
        return self.moment is not None and self.moment.is_new

    def read_content(self) -> tuple[memoryview, Any]:
        """Return (bytes of the tensor in the file's layout, tensor that owns these bytes)."""
        value, layout = self.find().detach(), self.tensor.layout
        has_layout = value.storage_offset() == layout.offset and value.stride() == layout.stride
        if not has_layout or value.untyped_storage().nbytes() != self.tensor.bytes:
            value = self.tensor.allocate().copy_(value)
        return bytes_of(value.untyped_storage()), value

    def bind(self, memory: Memory) -> None:
        """Make the tensor in the model or optimizer use this memory, with the memory's content.

        A moment, also an absent one, is stored in the optimizer as a new tensor.
        """
        value = self.tensor.layout.tensor_in(memory.storage)
        if self.moment is None:
            self.find().data = value
        else:
            self.moment.store(value)


class StateStore:
    """The state of a step with an optimizer: in RAM, or for the keys in `stored` in a file.

    With `rollback`, the file in `folder` has two generations of all state, so that the
    last complete one remains if a step fails or the process is killed, and replaces the file from
    which the model was recovered. `close`, deletion of the
    object, or normal exit of the process removes the file.
    """

    def __init__(
        self, trace: Trace, stored: Collection[StateKey], *, folder: str | Path, rollback: bool
    ) -> None:
        self._states = {state.key: state for state in _find_states(trace)}
        self._memories: dict[StateKey, Memory] = {}
        self._stored: frozenset[StateKey] = frozenset()
        self._is_trial = False
        self.mirrored_bytes = 0
        """Bytes of state with its home in RAM that `commit` has written to the file so far [B]."""
        model = trace.joint.module.get_submodule(BODY)
        self._optimizer = trace.joint.optimizer
        with replace_recovered_file(folder, model, removes=rollback) as steps:
            self.file = StateFile(
                folder,
                {key: state.tensor for key, state in self._states.items()},
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
                self._set_homes(frozenset(stored))
            except BaseException:
                self.file.close()
                raise
        weakref.finalize(self, _close_ignoring_errors, self.file).atexit = False

    @property
    def has_two_generations(self) -> bool:
        """Whether the file has two generations."""
        return self.file.format.generations > 1

    def check_state(self, trace: Trace) -> None:
        """Refuse a step, with inputs of other shapes, whose state is not that of the first one."""
        for key, _ in trace.state.values():
            if key not in self._states:
                raise CaptureError(
                    f"{trace.joint.name}: {key.name} is updated with these inputs, but not with "
                    "the first ones; compile with such inputs first"
                )

    # -- around a step ---------------------------------------------------------------------------

    def prepare_step(self, stored: Collection[StateKey] | None = None) -> None:
        """Commit changes since the last step, then set homes unless `stored` is None.

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
        if stored is not None and self._stored != frozenset(stored):
            self._set_homes(frozenset(stored))

    def _update_file(self) -> None:
        """Write values of state that have changed to the file, and commit if there are changes.

        Finally binds tensors with their home on storage that are new or that the user has replaced.
        """
        absent, replaced_states = [], []
        for key, state in self._states.items():
            memory = self._memories.get(key)
            if state.is_absent:
                self._untrack(key)
                if self.file.contains(key):
                    absent.append(key)
            elif key in self._stored:
                is_bound = memory is not None and memory.is_memory_of(state.find())
                if not (is_bound and self.file.contains(key)):
                    # A new moment, or the user replaced the tensor: `optimizer.load_state_dict` or
                    # ``.data = ...``.
                    self._write(state)
                    replaced_states.append(state)
            elif self.has_two_generations:
                data, value = state.read_content()
                if not self.file.has_checksum(key, checksum(data)):
                    self._write(state)
                del data, value
        self.file.write_mapped_changes()
        if self.file.is_changed or absent:
            self.file.commit(absent=absent)
        for state in replaced_states:
            self._bind(state)
        self._bind_unmapped()

    def commit(self, *, steps: int = 1) -> None:
        """Commit the tensors that a step has written; add `steps` to the file's count of steps.

        With two generations, updated state in RAM is written to the file, too. In a `trial`,
        mappings show the written tensors until the next step instead.
        """
        if self.has_two_generations:
            for key, state in self._states.items():
                if state.is_updated and key not in self._stored and not state.is_absent:
                    self._write(state)
                    self.mirrored_bytes += state.tensor.bytes
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
        for key, state in self._states.items():
            if not state.is_updated or key in self._stored:
                continue
            if not self.file.contains(key):
                if state.moment is not None:
                    state.moment.remove()
                continue
            stored_value = state.tensor.allocate()
            self.file.read(key, bytes_of(stored_value.untyped_storage()))
            state.find().data.copy_(stored_value)

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
        self._stored = frozenset()

    # -- homes -----------------------------------------------------------------------------------

    def _set_homes(self, stored: frozenset[StateKey]) -> None:
        """Map the tensors with their home on storage to the file; move other ones to RAM.

        With one generation, newly stored values are first written and committed. With two, the file
        must contain them already.
        """
        for key in self._stored - stored:
            if self.file.contains(key):
                self.file.unmap(key)
        added_keys = stored - self._stored
        self._stored = stored
        if not self.has_two_generations:
            for key, state in self._states.items():
                if key in added_keys and not state.is_absent:
                    self._write(state)
            self.file.commit()
        self._bind_unmapped()

    def _bind_unmapped(self) -> None:
        """Bind tensors with their home on storage that are in the file, but not mapped yet."""
        for key in self._stored:
            if not self.file.is_tracked(key) and self.file.contains(key):
                self._bind(self._states[key])

    def _bind(self, state: _StateEntry) -> None:
        """Map memory copy-on-write to a tensor's value in the file, and make the tensor use it.

        The tensor's value in RAM is lost; commits map the memory again to new values.
        """
        key = state.key
        if key not in self._memories or self._memories[key].is_lost:
            self._memories[key] = Memory(state.tensor.bytes)
        memory = self._memories[key]
        self.file.map(key, memory)
        if state.is_absent or not memory.is_memory_of(state.find()):
            state.bind(memory)

    def _untrack(self, key: StateKey) -> None:
        """Forget the memory of a tensor: commits do not map it again."""
        self._memories.pop(key, None)
        self.file.untrack(key)

    def _write(self, state: _StateEntry) -> None:
        """Write the current value of a tensor to the file, for the next commit."""
        data, value = state.read_content()
        self.file.write(state.key, data)
        del data, value


def _close_ignoring_errors(file: StateFile) -> None:
    """Close a file when its store is deleted; the file remains if a tensor cannot move to RAM."""
    with suppress(PageError, OSError):
        file.close()


# -- state tensors of a step --------------------------------------------------------------------


def _find_states(trace: Trace) -> Iterator[_StateEntry]:
    """Yield the state that a step reads, then its modules' other CPU parameters and buffers."""
    joint, storages = trace.joint, trace.step_graph.storages
    replaced_indices = {storage.replaces for storage in storages}
    seen_storages = set()
    for index, (key, argument) in trace.state.items():
        source = argument.optimizer_value
        moment = source if isinstance(source, OptimizerMoment) else None
        find = partial(joint.value, argument) if moment is None else moment.value
        if moment is None:
            seen_storages.add(storage_key(find()))
        yield _StateEntry(
            key=key,
            tensor=StateTensor(bytes=storages[index].bytes, layout=storages[index].layouts[0]),
            find=find,
            moment=moment,
            is_updated=index in replaced_indices,
        )
    named_tensors_of_kind = {
        InputKind.PARAMETER: joint.module.named_parameters,
        InputKind.BUFFER: joint.module.named_buffers,
    }
    for kind, named_tensors in named_tensors_of_kind.items():
        for path, value in named_tensors():
            is_seen = storage_key(value) in seen_storages
            if is_seen or value.device.type != "cpu" or not value.nbytes:
                continue
            seen_storages.add(storage_key(value))
            tensor = StateTensor(
                bytes=value.untyped_storage().nbytes(), layout=TensorLayout.from_tensor(value)
            )
            key = StateKey(str(kind), path)
            yield _StateEntry(key=key, tensor=tensor, find=partial(attrgetter(path), joint.module))
