"""Locks between processes, which end with the process that has them however that ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.errors import InputError

if sys.platform != "win32":  # there, sweeps of one folder do not know of each other
    import fcntl

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A file that is locked for as long as this process lives, or until `release`."""

    path: Path
    """The file, which is there for the lock alone."""
    descriptor: int
    """It, opened."""

    @classmethod
    def take(cls, path: Path, *, wait: bool = False) -> Lock | None:
        """Return the lock of a file, which is made where it is missing.

        Parameters
        ----------
        path : Path
            The file.
        wait : bool
            Whether to wait for whoever has it, in place of returning None.

        Raises
        ------
        InputError
            If the file cannot be made.
        """
        while True:
            try:
                path.parent.mkdir(exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                msg = f"{path}: cannot be written ({error.strerror or error})"
                raise InputError(msg) from error
            if not _locked(descriptor, wait=wait):
                os.close(descriptor)
                return None
            if _is_still(path, descriptor):
                return cls(path=path, descriptor=descriptor)
            os.close(descriptor)  # it was released, and taken away, between opening and locking

    def release(self) -> None:
        """Take the file away and let others have the lock."""
        with suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)


def _locked(descriptor: int, *, wait: bool) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    else:
        return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Return whether a name still belongs to an opened file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
