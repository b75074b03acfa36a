"""A folder of what earlier compiles found: JSON files that any number of processes may share.

Each file has a line that says what it is, with the checksum of the rest, and a line of content. It
is written in one step. What cannot be read, or is not what was written, is not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from poetmodel.errors import InputError
from poetmodel.files import write_bytes

FORMAT: Final = "poetmodel-cache"
VERSION: Final = 1
MOST_FILES: Final = 512
"""Files that are kept; of more those go that were not used for longest."""
LARGEST_BYTES: Final = 2**28
FOLDER: Final = "POETMODEL_CACHE"
"""The environment variable with the folder to use where none is given; empty for no cache."""

_LOG: Final = logging.getLogger(__name__)


def digest(*parts: Any) -> str:
    """Return what tells plain values, as JSON has them, from all others."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def default_folder() -> Path | None:
    """Return the folder of the user's cache: `FOLDER`, none if empty, else below ``~/.cache``."""
    given = os.environ.get(FOLDER)
    if given is not None:
        return Path(given) if given else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "poetmodel"


class Cache:
    """Plain values by kind and key; without a folder nothing is found and nothing kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of(cls, given: str | Path | bool) -> Cache:  # noqa: FBT001 - as `compile` takes it
        """Return the cache that an option of `compile` means."""
        if given is False:
            return cls(None)
        try:
            return cls(default_folder() if given is True else Path(given))
        except RuntimeError:  # a user without a home
            return cls(None)

    def read(self, kind: str, key: str) -> Any:
        """Return what was written, or None; what is damaged is passed over."""
        if self.folder is None:
            return None
        path = self._path(kind, key)
        try:
            with path.open("rb") as stream:
                first, _, content = stream.read(LARGEST_BYTES).partition(b"\n")
            header = json.loads(first)
            if header != _header(kind, key, content):
                raise ValueError("another file, or a damaged one")  # noqa: TRY301 - as JSON's
            found = json.loads(content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            _LOG.info("%s: passed over (%s)", path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # used just now
        return found

    def write(self, kind: str, key: str, content: Any) -> None:
        """Keep plain values; where they cannot be written, that is logged."""
        if self.folder is None:
            return
        path = self._path(kind, key)
        text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        line = json.dumps(_header(kind, key, text)).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_bytes(path, line + b"\n" + text)
            self._prune()
        except (OSError, InputError) as error:
            _LOG.info("%s: cannot be written (%s)", path, error)

    def _path(self, kind: str, key: str) -> Path:
        return (self.folder or Path()) / f"{kind}-{key[:40]}.json"

    def _prune(self) -> None:
        """Remove what was not used for longest, if there is too much."""
        files = list((self.folder or Path()).glob("*-*.json"))
        if len(files) <= MOST_FILES:
            return
        used: list[tuple[float, Path]] = []
        for path in files:
            with suppress(OSError):  # another process has removed it
                used.append((path.stat().st_mtime, path))
        for _, path in sorted(used)[: len(used) - MOST_FILES]:
            path.unlink(missing_ok=True)


def _header(kind: str, key: str, content: bytes) -> dict[str, Any]:
    checksum = hashlib.sha256(content).hexdigest()
    return {"format": FORMAT, "version": VERSION, "kind": kind, "key": key, "sha256": checksum}
