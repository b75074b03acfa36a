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
from poetmodel.torch.state.file import (
    ABSENT,
    PREFIX,
    RECORD_COUNT,
    UNFINISHED,
    Format,
    Record,
    StateTensor,
)
from poetmodel.torch.state.pages import allocate_page, bytes_of, checksum, read_page
from poetmodel.torch.step.optimizers import Optimizers, find_owner, group_rules, optimizer_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    between. The file is locked until then, until `model` is deleted, or until `recover` is called
    for `model` again.

    Parameters
    ----------
    source : str or Path
        The folder that was the `storage` of the step, or one state file in it.
    model : torch.nn.Module
        A model of the same architecture; its parameters and buffers are overwritten.
    optimizer : torch.optim.Optimizer or sequence of them
        Optimizers of the parameters of `model`; their moments are overwritten. Settings such as the
        learning rate, and the number of updates of a `QuantizedSGD`, are not in the file.
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
    """Raise `InputError` unless a value is an instance of `expected_class`, a class of PyTorch.

    `name` is the name of the argument, for the message.
    """
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
        """Collect parameters and buffers by (kind, path), and moment keys by parameter ``id``.

        Paths begin with `BODY` for the model, and with `LOSS` for a loss that is a module. The keys
        are those of the optimizer's rule with its settings.
        """
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

    def find_tensor(self, tensor: StateTensor) -> torch.Tensor | None:
        """Return the parameter or buffer of a tensor in the file; for a moment its parameter.

        Returns None if the model has no such parameter or buffer.
        """
        owner_kind = InputKind.PARAMETER if tensor.kind == InputKind.MOMENT else tensor.kind
        return self._model_tensors.get((str(owner_kind), tensor.owner))

    def find_mismatches(self, tensors: tuple[StateTensor, ...]) -> Iterator[str]:
        """Yield a message for each mismatch between the tensors of a file and model or optimizer.

        Parameters and buffers must have equal names, shapes, types and shared memory, and may not
        be on the ``meta`` device. Empty ones of the model may be absent from the file. Moments are
        compared by `_find_moment_mismatches`; their shapes and types are not checked.
        """
        names_by_storage: dict[int, str] = {}
        for tensor in tensors:
            owner, layout = self.find_tensor(tensor), tensor.storage.layouts[0]
            if owner is None:
                yield f"{tensor.kind} {tensor.storage.name} is only in the file"
                continue
            if tensor.kind == InputKind.MOMENT:
                continue
            first_name = names_by_storage.setdefault(storage_key(owner), tensor.storage.name)
            if owner.is_meta:
                yield f"{tensor.storage.name} of the model has no memory (device meta)"
            elif first_name != tensor.storage.name:
                yield f"{first_name} and {tensor.storage.name} share memory only in the model"
            elif (tuple(owner.shape), owner.dtype) != (layout.shape, layout.dtype):
                yield (
                    f"{tensor.storage.name}: the file has {layout.dtype} {layout.shape}, "
                    f"the model {owner.dtype} {tuple(owner.shape)}"
                )
        yield from self._find_moment_mismatches(tensors)
        for (kind, path), value in self._model_tensors.items():
            if value.nbytes and storage_key(value) not in names_by_storage:
                yield f"{kind} {format_path(path)} is only in the model"

    def _find_moment_mismatches(self, tensors: tuple[StateTensor, ...]) -> Iterator[str]:
        """Yield an error per parameter whose moments in the file the optimizer cannot use.

        These are parameters that no optimizer of a supported class has, and parameters whose
        moments in the file have no key in common with the optimizer's rule, except ``step``. A rule
        without moments, such as that of SGD without momentum, accepts all moments.
        """
        keys_by_path: defaultdict[str, set[str]] = defaultdict(set)
        for tensor in tensors:
            if tensor.kind == InputKind.MOMENT and self.find_tensor(tensor) is not None:
                keys_by_path[tensor.owner].add(tensor.key)
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

    def set_value(self, tensor: StateTensor, value: torch.Tensor | None) -> None:
        """Copy a value into a parameter or buffer, or store it as a moment; None removes a moment.

        Has no effect if the model has no parameter or buffer for `tensor` (for a moment, no such
        parameter), if `value` is None and `tensor` is a parameter or buffer, or if the moment to
        remove is absent. A moment is stored without a copy.
        """
        owner = self.find_tensor(tensor)
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


class _AbandonedStateFile:
    """A state file that a killed process has left, locked by this process until `close`.

    Deletion of the object closes the file, too.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.close = finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self.steps = 0
        """Number of training steps after which the loaded state was written; 0 before `load`."""

    def load(self, targets: _RecoveryTargets) -> None:
        """Load the newest intact generation into the targets, and restore the random generator.

        Also sets `steps`, and logs damaged newer generations. Raises `InputError`, before any
        change, if the file cannot be read, the header is invalid, the file has only one generation,
        no generation is intact, or tensors do not match the targets. Also raises it if a tensor
        that was intact cannot be read again; the targets are then partly overwritten.
        """
        file_format = self.read_format()
        if file_format is None or file_format.generations == 1:
            raise InputError(
                f"{self.path}: cannot be recovered: it is no state file of this version of "
                "poetmodel on this system, its header is damaged, or it was written with "
                "rollback=False"
            )
        mismatches = list(targets.find_mismatches(file_format.tensors))
        if mismatches:
            reasons = "; ".join(mismatches)
            raise InputError(
                f"{self.path}: the state of {file_format.name} does not match model or optimizer: "
                f"{reasons}"
            )
        record = self._find_newest_intact(file_format)
        try:
            with torch.no_grad():
                for position, tensor in enumerate(file_format.tensors):
                    targets.set_value(tensor, self._read_tensor(file_format, record, position))
        except _DamageError as error:
            raise InputError(
                f"{self.path}: {error}, although it was intact before: the medium is failing; "
                "model and optimizer are partly overwritten"
            ) from None
        torch.set_rng_state(torch.frombuffer(bytearray(record.random_state), dtype=torch.uint8))
        self.steps = record.steps

    def read_format(self) -> Format | None:
        """Read the format from the header.

        Returns None if the header is incomplete, damaged, or of another version or block size.
        Raises `InputError` if the file cannot be read.
        """
        first_bytes = self._read_bytes(_FIRST_READ_BYTES, 0)
        header_bytes = Format.header_bytes(first_bytes)
        if header_bytes is None or header_bytes > os.fstat(self._descriptor).st_size:
            return None
        return Format.parse(self._read_bytes(header_bytes, 0))

    def read_records(self, file_format: Format) -> list[Record]:
        """Read the intact commit records, newest first.

        Raises `InputError` if the file cannot be read.
        """
        raw_records = (
            self._read_bytes(file_format.record_bytes, file_format.record_offset(position))
            for position in range(RECORD_COUNT)
        )
        records = [record for record in map(Record.parse, raw_records) if record is not None]
        return sorted(records, key=lambda record: -record.generation)

    def _read_bytes(self, size_bytes: int, offset: int) -> bytes:
        """Read bytes of the file, fewer at its end; raise `InputError` if the system refuses."""
        try:
            return os.pread(self._descriptor, size_bytes, offset)
        except OSError as error:
            raise _make_read_error(self.path, error) from None

    def _find_newest_intact(self, file_format: Format) -> Record:
        """Return the newest record whose tensors all match their checksums.

        Logs a warning about damaged newer generations; a tensor that cannot be read counts as
        damaged. Raises `InputError` if no record is intact, or the system refuses to read a record.
        """
        damage_reports = []
        for record in self.read_records(file_format):
            try:
                for position in range(len(file_format.tensors)):
                    self._read_tensor(file_format, record, position)
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
        self, file_format: Format, record: Record, position: int
    ) -> torch.Tensor | None:
        """Read a tensor of a record into new memory; return None if the tensor is absent.

        `position` is that in ``file_format.tensors``. If the tensor's storage has several layouts,
        the returned tensor has the first one. Raises `_DamageError` if the tensor cannot be read
        completely, or its checksum differs.
        """
        slot, storage = record.slots[position], file_format.tensors[position].storage
        if slot == ABSENT:
            return None
        storage_memory, tensors = allocate_page(storage)
        memory, offset = bytes_of(storage_memory), file_format.slot_offset(position, slot)
        try:
            read_bytes = read_page(self._descriptor, memory, offset)
        except OSError as error:
            raise _DamageError(f"{storage.name}: {error.strerror or error}") from None
        os.posix_fadvise(self._descriptor, offset, storage.bytes, os.POSIX_FADV_DONTNEED)
        if read_bytes < storage.bytes or checksum(memory) != record.checksums[position]:
            raise _DamageError(f"{storage.name} does not match its checksum")
        first_tensor: torch.Tensor = tensors[0] if isinstance(tensors, tuple) else tensors
        return first_tensor


def _make_read_error(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read ({error.strerror or error})")


class _DamageError(Exception):
    """A tensor of a file cannot be read completely, or its checksum differs."""


_LOADED_FILES: Final[WeakKeyDictionary[torch.nn.Module, _AbandonedStateFile]] = WeakKeyDictionary()
"""The file from which each model was recovered, until a new state file replaces it."""


def _find_abandoned_files(source: Path) -> Iterator[_AbandonedStateFile]:
    """Yield the state files of killed processes, sorted by path, and lock them.

    `source` is a folder, which may be missing, or a file. In a folder, files in use and unfinished
    files are skipped; a file in use is logged, unless this process has recovered a model from it.
    Raises `InputError` if `source` is a file in use, if a file cannot be opened, or if `source` is
    missing and its name has the prefix of state files.
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
    """Open a state file and lock it; return None if any process, also this one, has locked it.

    Also returns None if the file system has no locks. Raises `InputError` if the file cannot be
    opened.
    """
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
def replace_recovered_file(folder: str | Path, model: torch.nn.Module) -> Iterator[int]:
    """Context manager that at its end removes the file from which a model was recovered.

    The file remains, and is still locked, if the block raises or if the file is not in `folder`.

    Yields the number of training steps of the recovered state; 0 if the model was not recovered
    from this folder. First logs a warning about each other abandoned file with an intact commit
    record in the folder. Raises `InputError` if a state file in the folder cannot be opened or
    read.
    """
    loaded_file = _LOADED_FILES.get(model)
    if loaded_file is not None and loaded_file.path.parent.resolve() != Path(folder).resolve():
        loaded_file = None
    for file in _find_abandoned_files(Path(folder)) if Path(folder).is_dir() else ():
        file_format = file.read_format()
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
    if loaded_file is not None:
        del _LOADED_FILES[model]
        with suppress(OSError):
            loaded_file.path.unlink()
        loaded_file.close()
