"""Workers for the runs of a sweep: processes of this machine or of other machines."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.registry import backend_class, backend_names
from poetmodel.baselines.lookup import method
from poetmodel.baselines.own import list_method_files
from poetmodel.errors import InputError
from poetmodel.files import write_bytes
from poetmodel.process import LocalProcesses
from poetmodel.user_files import ROOT_VARIABLE, list_files, make_relative
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from poetmodel.sweeps.measurement import Record


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


class ShippingPool(Executor):
    """An executor that sends runs, with the files of their users' code, to a pool of the caller.

    Closing it leaves `pool` open. With `has_processes`, each worker executes runs in processes of
    its own; with `grace_s`, each run in a new one, which is killed after ``limit_s`` of the run's
    fields plus `grace_s` [s].
    """

    def __init__(
        self, pool: Executor, *, has_processes: bool = False, grace_s: float | None = None
    ) -> None:
        self.pool = pool
        self._has_processes = has_processes
        self._grace_s = grace_s

    def submit(self, measure: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function with the fields of a run, and its further inputs, in a worker."""
        run_fields = arguments[0]
        limit_s = None if self._grace_s is None else run_fields["limit_s"] + self._grace_s
        settings = (read_user_files(run_fields), self._has_processes, limit_s)
        return self.pool.submit(execute_shipped_run, __version__, *settings, measure, *arguments)


@dataclass(frozen=True, slots=True)
class UserFiles:
    """Copies of files of a run's method and back end, with the current folder of the caller."""

    contents: dict[str, bytes]
    """Contents of the files, by their absolute paths without the first slash."""
    folder: str
    """The current folder, likewise."""


def read_user_files(run_fields: dict[str, Any]) -> UserFiles | None:
    """Read the files of a run's method and back end, and of imported modules beside them.

    Imports method and back end. None for a run that names no such file.
    """
    contents: dict[str, bytes] = {}
    backend = run_fields.get("backend")
    if backend is not None and backend not in backend_names():
        contents |= _read_files(list_files(backend_class(backend)), backend)
    with suppress(KeyError, InputError):  # runs of bench may have no or an unknown method
        contents |= _read_files(
            list_method_files(method(run_fields["method"])), run_fields["method"]
        )
    return UserFiles(contents, make_relative(Path.cwd())) if contents else None


def _read_files(paths: Iterable[Path], name: str) -> dict[str, bytes]:
    """Read the files of ``FILE.py:NAME``, which may be a link to one of them; none for no files."""
    file = Path(name.rpartition(":")[0])
    contents = {make_relative(file.with_name(path.name)): path.read_bytes() for path in paths}
    return {**contents, make_relative(file): file.read_bytes()} if contents else {}


def execute_shipped_run(
    version: str,
    files: UserFiles | None,
    has_processes: bool,  # noqa: FBT001
    limit_s: float | None,
    measure: Callable[..., Record],
    *arguments: Any,
) -> Record:
    """Execute a run in a worker that may be on another machine; return its record.

    A run with files of users is executed in a process that finds copies of them. Raises
    `InputError` in a worker with another version of poetmodel, and `TimeLimitError` or
    `ProcessEndedError` of a run with its own process.
    """
    if version != __version__:
        raise InputError(f"the worker has poetmodel {__version__}, expected {version}")
    root = None if files is None else _write_files(files.contents)
    job = (measure, *arguments)
    if files is not None and root is not None:
        job = (_execute_with_files, root, files.folder, *job)
    if limit_s is not None:
        with LocalProcesses(lambda *_: limit_s) as new_processes:
            return dict(new_processes.submit(*job).result())
    if root is None and not has_processes:
        return measure(*arguments)
    return dict(_reused_processes(root).submit(*job).result())


def _execute_with_files(
    root: str, folder: str, measure: Callable[..., Record], *arguments: Any
) -> Record:
    """Execute a run in this process with copies of files below `root`, and `folder` there."""
    os.environ[ROOT_VARIABLE] = root
    (Path(root) / folder).mkdir(parents=True, exist_ok=True)
    os.chdir(Path(root) / folder)
    return measure(*arguments)


def _write_files(files: dict[str, bytes]) -> str:
    """Write files below a temporary folder; return the path of the folder.

    Its name is a hash of names and contents; existing files are not written again.
    """
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = _temporary_folder() / digest.hexdigest()[:16]
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
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
def _reused_processes(_root: str | None) -> LocalProcesses:
    """Return the processes that this worker reuses for runs with the same files of users."""
    return LocalProcesses()
