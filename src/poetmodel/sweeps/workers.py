"""Workers for the runs of a sweep: processes of this machine or of other machines."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.registry import backend_class, backend_names
from poetmodel.baselines.lookup import method
from poetmodel.baselines.own import list_method_files
from poetmodel.device.io import device_names
from poetmodel.errors import InputError
from poetmodel.files import read_bytes, write_bytes
from poetmodel.graph.catalogue import model_names
from poetmodel.process import LocalProcesses
from poetmodel.user_files import list_files
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from poetmodel.sweeps.measurement import Record

Files = dict[str, bytes]
"""Contents of files of one folder, by name."""
_MODEL, _DEVICE, _METHOD, _BACKEND = "model", "device", "method", "backend"
"""Fields of a run that may name a file."""


def pool_name(pool: Executor) -> str:
    """Return package and class of a pool for records; a `ShippingPool` has those of its pool."""
    pool = getattr(pool, "pool", pool)
    return f"{type(pool).__module__.partition('.')[0]}.{type(pool).__qualname__}"


# -- pools that may be on other machines -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModuleFunction:
    """A callable that imports a module from a folder and calls its function, in any process."""

    folder: str
    """The folder, with the same path on each machine."""
    module: str
    """Name of the module."""
    name: str
    """Name of the function."""

    def __call__(self, *arguments: Any) -> Any:
        """Add the folder to ``sys.path``, import the module and call the function."""
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        return getattr(importlib.import_module(self.module), self.name)(*arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Settings of the processes that workers start for their runs."""

    grace_s: float | None = None
    """A run is killed after ``limit_s`` of its fields plus this time [s], and its future raises
    `TimeLimitError`; each run has a new process. None for processes that are reused, without a
    time limit."""


class ShippingPool(Executor):
    """An executor that sends runs with the files that they name to a pool of the caller.

    Closing it leaves `pool` open. Without `isolation`, runs are executed in the workers themselves.
    """

    def __init__(self, pool: Executor, isolation: Isolation | None = None) -> None:
        self.pool = pool
        self._isolation = isolation

    def submit(self, measure: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function with the fields of a run and its start schedule or None, in a worker."""
        run_fields, start = arguments
        files = read_run_files(run_fields)
        return self.pool.submit(
            execute_shipped_run, __version__, measure, run_fields, start, files, self._isolation
        )


def read_run_files(run_fields: dict[str, Any]) -> dict[str, Files]:
    """Read the files that a run names as model, device, method and back end; return them by field.

    Imports the files of method and back end, which include the imported modules of their folders.
    """
    files_by_field: dict[str, Files] = {}
    for field, names in ((_MODEL, model_names()), (_DEVICE, device_names())):
        name = run_fields.get(field)
        if name is not None and name not in names and Path(name).is_file():
            files_by_field[field] = {Path(name).name: read_bytes(name)}
    backend = run_fields.get(_BACKEND)
    if backend is not None and backend not in backend_names():
        files_by_field[_BACKEND] = _read_user_files(list_files(backend_class(backend)), backend)
    try:
        found_method = method(run_fields[_METHOD])
    except (KeyError, InputError):  # runs of bench may have no or an unknown method
        return files_by_field
    if method_paths := list_method_files(found_method):
        files_by_field[_METHOD] = _read_user_files(method_paths, run_fields[_METHOD])
    return files_by_field


def _read_user_files(paths: Iterable[Path], name: str) -> Files:
    """Read the files of ``FILE.py:NAME``, which may be a link to one of them."""
    content_by_name = {path.name: path.read_bytes() for path in paths}
    file = Path(name.rpartition(":")[0])
    return {**content_by_name, file.name: file.read_bytes()}


def execute_shipped_run(
    version: str,
    measure: Callable[..., Record],
    run_fields: dict[str, Any],
    start: Any,
    files_by_field: dict[str, Files],
    isolation: Isolation | None,
) -> Record:
    """Execute a run in a worker that may be on another machine; return its record.

    The run reads the files from temporary folders; the record has the paths of the caller. Raises
    `InputError` in a worker with another version of poetmodel, and `TimeLimitError` or
    `ProcessEndedError` of an isolated run.
    """
    if version != __version__:
        raise InputError(f"the worker has poetmodel {__version__}, expected {version}")
    folders = {field: _write_files(contents) for field, contents in files_by_field.items()}
    # The base name of a method or back end contains its :NAME.
    local_paths = {
        field: f"{folders[field]}/{Path(run_fields[field]).name}" for field in files_by_field
    }
    arguments = (measure, {**run_fields, **local_paths}, start)
    if isolation is None:
        record = measure(*arguments[1:])
    elif isolation.grace_s is None:
        user_folders = (folders.get(_METHOD), folders.get(_BACKEND))
        record = _reused_processes(*user_folders).submit(*arguments).result()
    else:
        limit_s = run_fields["limit_s"] + isolation.grace_s
        with LocalProcesses(lambda *_: limit_s) as new_processes:
            record = new_processes.submit(*arguments).result()
    record_text = json.dumps(record)
    for field, path in local_paths.items():
        record_text = record_text.replace(
            json.dumps(path)[1:-1], json.dumps(run_fields[field])[1:-1]
        )
    return dict(json.loads(record_text))


def _write_files(files: Files) -> str:
    """Write files to a temporary folder; return the path of the folder.

    Its name is a hash of names and contents; existing files are not written again.
    """
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = _temporary_folder() / digest.hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if not (folder / name).exists():
            write_bytes(folder / name, content)
    return str(folder)


@cache
def _temporary_folder() -> Path:
    """Return the temporary folder of this process, which is removed when the process ends."""
    temporary_folder = tempfile.TemporaryDirectory(prefix="poetmodel-", ignore_cleanup_errors=True)
    _TEMPORARY_FOLDERS.append(temporary_folder)
    return Path(temporary_folder.name)


_TEMPORARY_FOLDERS: Final[list[tempfile.TemporaryDirectory[str]]] = []
"""Temporary folders of this process. The list keeps their objects, because a folder is removed with
its object."""


@cache
def _reused_processes(_method_folder: str | None, _backend_folder: str | None) -> LocalProcesses:
    """Return the processes that this worker reuses for files of users, by their folders."""
    return LocalProcesses()
