"""Recovery: the state that a killed process has left in its file, loaded into a model."""

from __future__ import annotations

import fcntl
import logging
import os
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, finalize

import torch

from poetmodel.errors import InputError, listed, shown
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.capturing.joint_graph import BODY, InputKind, shown_path
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.state.file import (
    ABSENT,
    PREFIX,
    RECORDS,
    UNFINISHED,
    Format,
    Record,
    StateTensor,
)
from poetmodel.torch.state.pages import blank, bytes_of, checksum, read_page
from poetmodel.torch.step.optimizers import Optimizers, find_owner, group_rules, members_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger(__name__)

_HEADER_BYTES: Final = 1 << 12
"""How much of a file is read before it is known how long its header is."""


def recover(
    source: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    loss_fn: torch.nn.Module | None = None,
) -> int:
    """Load the state that a killed process has left: all of it after one and the same step.

    Call it before `compile`. The file stays until a step of this model is compiled with the same
    folder as its `storage` and has the state in turn: a process that is killed in between loses
    nothing.

    Parameters
    ----------
    source : str or Path
        The folder that was the `storage` of the step, or one state file in it.
    model : torch.nn.Module
        Of the same architecture; gets parameters and buffers.
    optimizer : torch.optim.Optimizer or sequence of them
        Of the parameters of `model`; gets the moments. Settings such as the learning rate are not
        in the file.
    loss_fn : torch.nn.Module, optional
        The loss, where it has parameters or buffers of its own.

    Returns
    -------
    int
        Training steps that were done; 0 if there is nothing to load, or only files of processes
        that run. The random generator is as it was after them.

    Raises
    ------
    InputError
        If the file is of another model or optimizer, damaged, or in use, or if there are several;
        nothing is loaded then.
    """
    check_kind("model", model, torch.nn.Module)
    for each in members_of(Optimizers.combine(optimizer)):
        check_kind("optimizer", each, torch.optim.Optimizer)
    loaded = _LOADED.pop(model, None)
    if loaded is not None:
        loaded.close()
    files = list(_left(Path(source)))
    if len(files) > 1:
        told = "; ".join(str(file.path) for file in files)
        raise InputError(
            f"{source}: several runs have left their state: {told}; give the file of one, and "
            "delete those that nobody needs"
        )
    for file in files:
        file.load(_Targets(model, optimizer, loss_fn))
        _LOADED[model] = file
        return file.steps
    return 0


def check_kind(name: str, given: object, kind: type) -> None:
    """Raise `InputError` unless what was given is of a kind."""
    if not isinstance(given, kind):
        raise InputError(f"{name}: expected {kind.__name__} of torch, got {shown(given)}")


class _Targets:
    """Where the tensors of a file go: a model with its loss, and an optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss_fn: torch.nn.Module | None,
    ) -> None:
        self.optimizer = optimizer = Optimizers.combine(optimizer)
        modules = {BODY: model} | ({LOSS: loss_fn} if loss_fn is not None else {})
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}
        for prefix, module in modules.items():
            parameters = module.named_parameters(prefix, remove_duplicate=False)
            buffers = module.named_buffers(prefix, remove_duplicate=False)
            self._tensors |= {(InputKind.PARAMETER, path): value for path, value in parameters}
            self._tensors |= {(InputKind.BUFFER, path): value for path, value in buffers}
        self._moments = {
            id(p): rule.moments for rule, parameters in group_rules(optimizer) for p in parameters
        }
        """State of the optimizer for each parameter, as far as that is known."""

    def owner(self, tensor: StateTensor) -> torch.Tensor | None:
        """Return the parameter or buffer of a tensor of the file; for a moment its parameter."""
        kind = InputKind.PARAMETER if tensor.kind == InputKind.MOMENT else tensor.kind
        return self._tensors.get((str(kind), tensor.owner))

    def faults(self, tensors: tuple[StateTensor, ...]) -> Iterator[str]:
        """Yield why the tensors of a file are not those that are there."""
        met: dict[int, str] = {}
        for tensor in tensors:
            owner, layout = self.owner(tensor), tensor.storage.layouts[0]
            if owner is None:
                yield f"{tensor.kind} {tensor.storage.name} is in the file only"
                continue
            if tensor.kind == InputKind.MOMENT:
                continue
            first = met.setdefault(storage_key(owner), tensor.storage.name)
            if owner.is_meta:
                yield f"{tensor.storage.name} of the model has no memory (device meta)"
            elif first != tensor.storage.name:
                yield f"{first} and {tensor.storage.name} are the same tensor in the model only"
            elif (tuple(owner.shape), owner.dtype) != (layout.shape, layout.dtype):
                yield (
                    f"{tensor.storage.name}: the file has {layout.dtype} {layout.shape}, "
                    f"the model {owner.dtype} {tuple(owner.shape)}"
                )
        yield from self._moment_faults(tensors)
        for (kind, path), value in self._tensors.items():
            if value.nbytes and storage_key(value) not in met:
                yield f"{kind} {shown_path(path)} is in the model only"

    def _moment_faults(self, tensors: tuple[StateTensor, ...]) -> Iterator[str]:
        """Yield why the moments of a file are not those that the optimizer keeps."""
        kept: defaultdict[str, set[str]] = defaultdict(set)
        for tensor in tensors:
            if tensor.kind == InputKind.MOMENT and self.owner(tensor) is not None:
                kept[tensor.owner].add(tensor.key)
        for path, keys in kept.items():
            parameter = self._tensors[InputKind.PARAMETER, path]
            wanted = self._moments.get(id(parameter))
            if wanted is None:
                yield f"the optimizer has no parameter {shown_path(path)}"
            elif wanted and not (keys & set(wanted)) - {"step"}:
                yield (
                    f"the file has {listed(sorted(keys))} of {shown_path(path)}, and the "
                    f"optimizer {type(find_owner(self.optimizer, parameter)).__name__} keeps "
                    f"{listed(sorted(wanted))}"
                )

    def put(self, tensor: StateTensor, value: torch.Tensor | None) -> None:
        """Let a tensor have a value; None takes a moment away."""
        owner = self.owner(tensor)
        if owner is None:
            return
        if tensor.kind != InputKind.MOMENT:
            if value is not None:
                owner.data.copy_(value)
            return
        state = find_owner(self.optimizer, owner).state
        if value is not None:
            state[owner][tensor.key] = value
        elif owner in state:
            state[owner].pop(tensor.key, None)


class _StateLeft:
    """A state file that no process uses, but now this one."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.close = finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self.steps = 0
        """Training steps that made what was loaded last."""

    def load(self, targets: _Targets) -> None:
        """Load the last whole state; raise `InputError`, and load nothing, if there is none."""
        form = self.form()
        if form is None or form.generations == 1:
            raise InputError(
                f"{self.path}: is no state file of this version of poetmodel, or was made with "
                "rollback=False: it cannot be recovered"
            )
        faults = list(targets.faults(form.tensors))
        if faults:
            told = "; ".join(faults)
            raise InputError(f"{self.path}: the state of {form.name} is of another model: {told}")
        record = self._whole(form)
        with torch.no_grad():
            for position, tensor in enumerate(form.tensors):
                targets.put(tensor, self._read(form, record, position))
        torch.set_rng_state(torch.frombuffer(bytearray(record.random), dtype=torch.uint8))
        self.steps = record.steps

    def form(self) -> Format | None:
        """Return the file's description of itself; None if it has none that is known."""
        beginning = os.pread(self._descriptor, _HEADER_BYTES, 0)
        needed = Format.needed(beginning)
        if needed is None or needed > os.fstat(self._descriptor).st_size:
            return None
        return Format.parsed(os.pread(self._descriptor, needed, 0))

    def records(self, form: Format) -> list[Record]:
        """Return the records that are whole, the newest first."""
        written = (
            os.pread(self._descriptor, form.record_bytes, form.record_offset(k))
            for k in range(RECORDS)
        )
        whole = [record for record in map(Record.parsed, written) if record is not None]
        return sorted(whole, key=lambda record: -record.generation)

    def _whole(self, form: Format) -> Record:
        """Return the newest record all of whose tensors are what was written."""
        damages = []
        for record in self.records(form):
            try:
                for position in range(len(form.tensors)):
                    self._read(form, record, position)
            except _DamageError as damage:
                damages.append(f"{damage} after {record.steps} steps")
                continue
            if damages:
                _log.warning(
                    "%s: damaged: %s; the state after %d steps is loaded",
                    self.path,
                    "; ".join(damages),
                    record.steps,
                )
            return record
        told = "; ".join(damages) or "no commit record"
        raise InputError(
            f"{self.path}: there is no whole state in it ({told}); load a checkpoint, and delete it"
        )

    def _read(self, form: Format, record: Record, position: int) -> torch.Tensor | None:
        """Return a tensor, or None if it is not there.

        Raises `_DamageError` if it is not what was written.
        """
        slot, storage = record.slots[position], form.tensors[position].storage
        if slot == ABSENT:
            return None
        held, value = blank(storage)
        memory, offset = bytes_of(held), form.slot_offset(position, slot)
        try:
            done = read_page(self._descriptor, memory, offset)
        except OSError as error:
            raise _DamageError(f"{storage.name}: {error.strerror or error}") from None
        os.posix_fadvise(self._descriptor, offset, storage.bytes, os.POSIX_FADV_DONTNEED)
        if done < storage.bytes or checksum(memory) != record.sums[position]:
            raise _DamageError(f"{storage.name} is not what was written")
        first: torch.Tensor = value[0] if isinstance(value, tuple) else value
        return first


class _DamageError(Exception):
    """A tensor of a file is not what was written."""


_LOADED: Final[WeakKeyDictionary[torch.nn.Module, _StateLeft]] = WeakKeyDictionary()
"""The file whose state a model has, until the model has a new one."""


def _left(source: Path) -> Iterator[_StateLeft]:
    """Yield the files of processes that are gone, locked for this one."""
    if not source.exists() and not source.name.startswith(PREFIX):
        return  # `compile` makes the folder
    if not source.is_dir():
        file = _opened(source)
        if file is None:
            raise InputError(f"{source}: the state file is in use by a process that runs")
        yield file
        return
    for path in sorted(source.glob(f"{PREFIX}*")):
        if path.suffix != UNFINISHED:
            file = _opened(path)
            if file is not None:
                yield file
            elif path not in {left.path for left in _LOADED.values()}:
                _log.info("%s: the state of a run that goes on", path)


def _opened(path: Path) -> _StateLeft | None:
    """Return a state file, locked for this process; None if another one has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return _StateLeft(path, descriptor)


@contextmanager
def replaced_by(folder: str | Path, model: torch.nn.Module) -> Iterator[int]:
    """Remove the file that a model was recovered from, once a new one has its state.

    Gives the training steps that the state is from, 0 where it was not recovered. Other files that
    were left in the folder are only reported.
    """
    loaded = _LOADED.get(model)
    if loaded is not None and loaded.path.parent.resolve() != Path(folder).resolve():
        loaded = None
    for file in _left(Path(folder)) if Path(folder).is_dir() else ():
        form = file.form()
        records = [] if form is None else file.records(form)
        if form is not None and records:
            _log.warning(
                "%s: a process that was killed has left the state of %s after %d steps; load it "
                "with poetmodel.torch.recover, or delete the file",
                file.path,
                form.name,
                records[0].steps,
            )
        file.close()
    yield 0 if loaded is None else loaded.steps
    if loaded is not None:
        del _LOADED[model]
        with suppress(OSError):
            loaded.path.unlink()
        loaded.close()
