"""Recovery: load the state that a killed process has left into a model and its optimizers."""

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

from poetmodel.errors import InputError, join_names, quote
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.capturing.joint_graph import BODY, InputKind, format_path
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.state.file import PREFIX, UNFINISHED
from poetmodel.torch.state.format import (
    RECORD_COUNT,
    Format,
    OlderVersionError,
    Record,
    encoded_bytes,
)
from poetmodel.torch.state.pages import bytes_of, find_read_fault
from poetmodel.torch.step.optimizers import (
    Optimizers,
    find_owner,
    group_rules,
    optimizer_members,
    read_update_counts,
    set_update_counts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from poetmodel.torch.state.format import StateTensor
    from poetmodel.torch.step.state_keys import StateKey

_LOG = logging.getLogger(__name__)

_FIRST_READ_BYTES: Final = 1 << 12
"""Number of bytes to read before the length of the header is known [B]."""


def recover(
    source: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> int:
    """Load the state that a killed process has left, with all tensors from the same step.

    Call it before `compile`. The file remains until a step of this model is compiled with the same
    folder as its `storage` and has written the state: no state is lost if a process is killed in
    between. Steps with ``rollback=False`` write no such state and leave the file. The file is
    locked until then, until `model` is deleted, or until `recover` is called for `model` again.

    Parameters
    ----------
    source : str or Path
        The folder that was the `storage` of the step, or one state file in it.
    model : torch.nn.Module
        A model of the same architecture; its parameters and buffers are overwritten.
    optimizer : torch.optim.Optimizer or sequence of them
        Optimizers of the parameters of `model`; their moments, and the number of updates of a
        `QuantizedSGD`, are overwritten. Settings such as the learning rate are not in the file.
    loss_fn : callable, optional
        The loss, needed if it is a module with its own parameters or buffers. A function is
        ignored.

    Returns
    -------
    int
        Number of completed training steps of the loaded state; 0 if a folder is missing, has no
        finished state file, or has only files of running processes. With a loaded state, PyTorch's
        random generator is restored to its state after these steps.

    Raises
    ------
    InputError
        If the file belongs to another model or optimizer, contains no intact state, was written
        with ``rollback=False`` or by another version of poetmodel, or cannot be read; if `source`
        is a file in use; if several processes have left a file; or if `model` or `optimizer` has
        the wrong class. Then all state is unchanged, except if a tensor that was intact can no
        longer be read while it is loaded, as the message then states.
    """
    check_class("model", model, torch.nn.Module)
    for member in optimizer_members(Optimizers.combine(optimizer)):
        check_class("optimizer", member, torch.optim.Optimizer)
    loaded_file = _LOADED_FILES.pop(model, None)
    if loaded_file is not None:
        loaded_file.close()
    files = list(_find_abandoned_files(Path(source)))
    if len(files) > 1:
        paths = "; ".join(str(file.path) for file in files)
        raise InputError(
            f"{source}: several processes have left their state: {paths}; pass one of these files, "
            "and delete the others"
        )
    for file in files:
        file.load(_RecoveryTargets(model, optimizer, loss_fn))
        _LOADED_FILES[model] = file
        return file.steps
    return 0


def check_class(name: str, value: object, expected_class: type) -> None:
    """Raise `InputError` unless a value is an instance of `expected_class`."""
    if not isinstance(value, expected_class):
        raise InputError(f"{name}: expected {expected_class.__name__} of torch, got {quote(value)}")


class _RecoveryTargets:
    """Destinations of the tensors of a state file: a model with its loss, and an optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss_fn: Callable[..., torch.Tensor] | None,
    ) -> None:
        self.optimizer = optimizer = Optimizers.combine(optimizer)
        modules = {BODY: model}
        if isinstance(loss_fn, torch.nn.Module):  # a function has no state
            modules[LOSS] = loss_fn
        self._model_tensors: dict[tuple[str, str], torch.Tensor] = {}
        for prefix, module in modules.items():
            parameters = module.named_parameters(prefix, remove_duplicate=False)
            buffers = module.named_buffers(prefix, remove_duplicate=False)
            self._model_tensors |= {
                (InputKind.PARAMETER, path): value for path, value in parameters
            }
            self._model_tensors |= {(InputKind.BUFFER, path): value for path, value in buffers}
        self._moment_keys = {
            id(p): rule.moment_keys
            for rule, parameters in group_rules(optimizer)
            for p in parameters
        }
        """Keys of the moments of each parameter, by its id."""

    def find_tensor(self, key: StateKey) -> torch.Tensor | None:
        """Return the parameter or buffer of a tensor in the file, for a moment its parameter."""
        owner_kind = InputKind.PARAMETER if key.kind == InputKind.MOMENT else key.kind
        return self._model_tensors.get((str(owner_kind), key.owner))

    def find_mismatches(self, tensors: Mapping[StateKey, StateTensor]) -> Iterator[str]:
        """Yield a message for each mismatch between tensors of a file and model or optimizer."""
        names_by_storage: dict[int, str] = {}
        for key, tensor in tensors.items():
            owner, layout = self.find_tensor(key), tensor.layout
            if owner is None:
                yield f"{key.kind} {key.name} is only in the file"
                continue
            if key.kind == InputKind.MOMENT:
                continue
            first_name = names_by_storage.setdefault(storage_key(owner), key.name)
            if owner.is_meta:
                yield f"{key.name} of the model has no memory (device meta)"
            elif first_name != key.name:
                yield f"{first_name} and {key.name} share memory only in the model"
            elif (tuple(owner.shape), owner.dtype) != (layout.shape, layout.dtype):
                yield (
                    f"{key.name}: the file has {layout.dtype} {layout.shape}, "
                    f"the model {owner.dtype} {tuple(owner.shape)}"
                )
        yield from self._find_moment_mismatches(tensors)
        for (kind, path), value in self._model_tensors.items():
            if value.nbytes and storage_key(value) not in names_by_storage:
                yield f"{kind} {format_path(path)} is only in the model"

    def _find_moment_mismatches(self, state_keys: Iterable[StateKey]) -> Iterator[str]:
        """Yield an error per parameter whose moments in the file the optimizer cannot use.

        A rule without moments, such as that of SGD without momentum, accepts all moments.
        """
        keys_by_path: defaultdict[str, set[str]] = defaultdict(set)
        for key in state_keys:
            if key.kind == InputKind.MOMENT and self.find_tensor(key) is not None:
                keys_by_path[key.owner].add(key.moment)
        for path, keys in keys_by_path.items():
            parameter = self._model_tensors[InputKind.PARAMETER, path]
            expected_keys = self._moment_keys.get(id(parameter))
            if expected_keys is None:
                yield f"no optimizer of a supported class has the parameter {format_path(path)}"
            elif expected_keys and not (keys & set(expected_keys)) - {"step"}:
                yield (
                    f"the file has {join_names(sorted(keys))} of {format_path(path)}, and the "
                    f"optimizer {type(find_owner(self.optimizer, parameter)).__name__} has "
                    f"{join_names(sorted(expected_keys))}"
                )

    def find_count_mismatch(self, counts: tuple[int, ...]) -> str | None:
        """Return a message if a file's update counts do not fit the optimizer's groups, or None."""
        group_count = len(read_update_counts(self.optimizer))
        if not counts or group_count in (0, len(counts)):
            return None
        return (
            f"the file has the updates of {len(counts)} parameter groups of QuantizedSGD, and the "
            f"optimizer has {group_count}"
        )

    def set_update_counts(self, counts: tuple[int, ...]) -> None:
        """Set the update counts, if the file has any and the optimizer counts updates."""
        if counts and read_update_counts(self.optimizer):
            set_update_counts(self.optimizer, counts)

    def set_value(self, key: StateKey, value: torch.Tensor | None) -> None:
        """Copy a value into a parameter or buffer, or store a moment; None removes the moment."""
        owner = self.find_tensor(key)
        if owner is None:
            return
        if key.kind != InputKind.MOMENT:
            if value is not None:
                # PyTorch does not overwrite repetitions, as of the gradients of int8 weights.
                distinct = tuple(slice(None) if stride else slice(1) for stride in owner.stride())
                owner.data[distinct].copy_(value[distinct])
            return
        state = find_owner(self.optimizer, owner).state
        if value is not None:
            state[owner][key.moment] = value
        elif owner in state:
            state[owner].pop(key.moment, None)


class _AbandonedStateFile:
    """A state file that a killed process has left, locked by this process until `close`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.close = finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self.steps = 0
        """Number of training steps after which the loaded state was written; 0 before `load`."""

    def load(self, targets: _RecoveryTargets) -> None:
        """Load the newest intact generation into the targets, and restore the random generator.

        All checks precede the first change, unless a tensor that was intact cannot be read again.
        """
        file_format = self.read_format()
        if file_format is None or file_format.generations == 1:
            raise InputError(
                f"{self.path}: cannot be recovered: it is no state file of this version of "
                "poetmodel on this system, its header is damaged, or it was written with "
                "rollback=False"
            )
        self._refuse(file_format, list(targets.find_mismatches(file_format.tensors)))
        record = self._find_newest_intact(file_format)
        count_mismatch = targets.find_count_mismatch(record.update_counts)
        self._refuse(file_format, [count_mismatch] if count_mismatch else [])
        try:
            with torch.no_grad():
                for key in file_format.tensors:
                    targets.set_value(key, self._read_tensor(file_format, record, key))
        except _DamageError as error:
            raise InputError(
                f"{self.path}: {error}, although it was intact before: the medium is failing; "
                "model and optimizer are partly overwritten"
            ) from None
        targets.set_update_counts(record.update_counts)
        torch.set_rng_state(torch.frombuffer(bytearray(record.random_state), dtype=torch.uint8))
        self.steps = record.steps

    def _refuse(self, file_format: Format, mismatches: list[str]) -> None:
        """Raise `InputError` with all mismatches, if there are any."""
        if mismatches:
            raise InputError(
                f"{self.path}: the state of {file_format.name} does not match model or optimizer: "
                f"{'; '.join(mismatches)}"
            )

    def read_format(self) -> Format | None:
        """Read the format from the header; None if it is damaged; refuses an older version."""
        first_bytes = self._read_bytes(_FIRST_READ_BYTES, 0)
        header_bytes = encoded_bytes(first_bytes)
        if header_bytes is None or header_bytes > os.fstat(self._descriptor).st_size:
            return None
        try:
            return Format.parse(self._read_bytes(header_bytes, 0))
        except OlderVersionError as error:
            raise InputError(f"{self.path}: {error}") from None

    def read_records(self, file_format: Format) -> list[Record]:
        """Read the intact commit records, newest first."""
        raw_records = (
            self._read_bytes(file_format.record_bytes, file_format.record_offset(position))
            for position in range(RECORD_COUNT)
        )
        parsed_records = (Record.parse(encoded, file_format) for encoded in raw_records)
        records = [record for record in parsed_records if record is not None]
        return sorted(records, key=lambda record: -record.generation)

    def _read_bytes(self, size_bytes: int, offset: int) -> bytes:
        """Read bytes of the file, fewer at its end; raise `InputError` if the system refuses."""
        try:
            return os.pread(self._descriptor, size_bytes, offset)
        except OSError as error:
            raise _make_read_error(self.path, error) from None

    def _find_newest_intact(self, file_format: Format) -> Record:
        """Return the newest record whose tensors all match their checksums; log damaged ones."""
        damage_reports = []
        for record in self.read_records(file_format):
            try:
                for key in file_format.tensors:
                    self._read_tensor(file_format, record, key)
            except _DamageError as error:
                damage_reports.append(f"{error} after {record.steps} steps")
                continue
            if damage_reports:
                _LOG.warning(
                    "%s: damaged: %s; loading the state after %d steps",
                    self.path,
                    "; ".join(damage_reports),
                    record.steps,
                )
            return record
        reason = "; ".join(damage_reports) or "no commit record"
        raise InputError(
            f"{self.path}: contains no intact state ({reason}); load a checkpoint, and delete "
            "the file"
        )

    def _read_tensor(
        self, file_format: Format, record: Record, key: StateKey
    ) -> torch.Tensor | None:
        """Read a tensor of a record into new memory; return None if the tensor is absent."""
        entry = record.entries.get(key)
        if entry is None:
            return None
        value = file_format.tensors[key].allocate()
        memory, offset = bytes_of(value.untyped_storage()), file_format.slot_offset(key, entry.slot)
        fault = find_read_fault(self._descriptor, memory, offset, entry.checksum)
        if fault:
            raise _DamageError(f"{key.name}{fault}")
        return value


def _make_read_error(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read ({error.strerror or error})")


class _DamageError(Exception):
    """A tensor of a file cannot be read completely, or its checksum differs."""


_LOADED_FILES: Final[WeakKeyDictionary[torch.nn.Module, _AbandonedStateFile]] = WeakKeyDictionary()
"""The file from which each model was recovered, until a new state file replaces it."""


def _find_abandoned_files(source: Path) -> Iterator[_AbandonedStateFile]:
    """Yield the state files of killed processes in a folder or path, sorted, and lock them.

    In a folder, files in use and unfinished files are skipped.
    """
    if not source.exists() and not source.name.startswith(PREFIX):
        return  # `compile` creates the folder
    if not source.is_dir():
        file = _open_locked(source)
        if file is None:
            raise InputError(f"{source}: the state file is in use by a running process")
        yield file
        return
    for path in sorted(source.glob(f"{PREFIX}*")):
        if path.suffix != UNFINISHED:
            file = _open_locked(path)
            if file is not None:
                yield file
            elif path not in {loaded_file.path for loaded_file in _LOADED_FILES.values()}:
                _LOG.info("%s: the state of a running process", path)


def _open_locked(path: Path) -> _AbandonedStateFile | None:
    """Open a state file and lock it; return None if any process has locked it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _make_read_error(path, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return _AbandonedStateFile(path, descriptor)


@contextmanager
def replace_recovered_file(
    folder: str | Path, model: torch.nn.Module, *, removes: bool = True
) -> Iterator[int]:
    """Remove, at the end of the block, the file in `folder` from which the model was recovered.

    Yields the number of training steps of the recovered state, else 0. The file remains if the
    block raises, or without `removes`. Logs other abandoned files with an intact record.
    """
    loaded_file = _LOADED_FILES.get(model)
    if loaded_file is not None and loaded_file.path.parent.resolve() != Path(folder).resolve():
        loaded_file = None
    for file in _find_abandoned_files(Path(folder)) if Path(folder).is_dir() else ():
        try:
            file_format = file.read_format()
        except InputError as error:
            _LOG.warning("%s", error)
            file_format = None
        records = [] if file_format is None else file.read_records(file_format)
        if file_format is not None and records:
            _LOG.warning(
                "%s: a killed process has left the state of %s after %d steps; load it with "
                "poetmodel.torch.recover, or delete the file",
                file.path,
                file_format.name,
                records[0].steps,
            )
        file.close()
    yield 0 if loaded_file is None else loaded_file.steps
    if loaded_file is not None and removes:
        del _LOADED_FILES[model]
        with suppress(OSError):
            loaded_file.path.unlink()
        loaded_file.close()
