"""Access to files: shipped data, installed packages, safe reading, atomic writing."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections import Counter
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from poetmodel.errors import InputError, quote, suggest_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LICENCE_FILE: Final = "LICENSE"
"""Name of the file with the licence's text."""


def shipped_folder(kind: Literal["graphs", "devices"]) -> Path:
    """Return the folder of shipped files of one kind."""
    return _find_shipped(kind)


@cache
def licence_text() -> str:
    """Return the text of poetmodel's licence, for files that it generates."""
    return _find_shipped(LICENCE_FILE).read_text(encoding="utf-8")


def _find_shipped(name: str) -> Path:
    """Return the path of shipped data: in the package, or in the sources of the project."""
    package = Path(str(files("poetmodel")))
    for path in (package / "_data" / name, package.parents[1] / name):
        if path.exists():
            return path
    raise InputError(f"the installation of poetmodel has no {name}; install it again")


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def licence(package: str) -> str:
    """Return the licence in the metadata of a package; "" if it states none or is not installed."""
    try:
        package_metadata = metadata(package)
    except PackageNotFoundError:
        return ""
    licences = (
        package_metadata[key]
        for key in ("License-Expression", "License")
        if key in package_metadata
    )
    return next((str(text) for text in licences if text), "")


@cache
def processor_line(*keys: str) -> str:
    """Return the first line of ``/proc/cpuinfo`` that starts with any of the keys; cached.

    Falls back to the processor name of the `platform` module, which may be empty.
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(keys):
                return line
    return platform.processor()


def read_bytes(path: str | Path, *, limit_bytes: int = 2**30, begin: int = 0) -> bytes:
    """Return a file's content from byte `begin` on; `InputError` if it exceeds `limit_bytes`."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            if begin:
                stream.seek(begin)
            content = stream.read(limit_bytes + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: expected a file, found a folder") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError:
        raise InputError(f"{quote(str(path))}: no file can have this name") from None
    if len(content) > limit_bytes:
        raise InputError(f"{path}: expected a file of at most {limit_bytes} bytes")
    return content


def read_text(path: str | Path, content: bytes | None = None, *, limit_bytes: int = 2**30) -> str:
    """Return the text of a UTF-8 file, or of its `content`, without a byte order mark."""
    if content is None:
        content = read_bytes(path, limit_bytes=limit_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8 text, got another encoding or a binary file "
            f"(byte {error.start})"
        ) from None


def parse_json(text: str, *, expected: str, faults: list[str] | None = None) -> object:
    """Parse JSON; NaN and infinities become floats, which the validation of each key refuses.

    `expected` names the format in `InputError`. A repeated key is an error, too; with `faults`, its
    message is added to that list, and its last value counts.
    """
    if not text.strip():
        raise InputError(f"expected a {expected} file (a JSON object), got an empty file")
    repeated_keys: list[str] = []

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the dict of an object's pairs; add keys that occur again to `repeated_keys`."""
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated_keys.extend(key for key, count in counts.items() if count > 1)
        return values

    try:
        document = json.loads(text, object_pairs_hook=make_object)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            msg = f"{position}: unexpected end of file: the JSON is truncated"
        else:
            msg = f"{position}: not valid JSON ({error.msg})"
        raise InputError(msg) from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number too long
        raise InputError(f"not valid JSON ({error})") from None
    messages = [f"{key}: the key comes twice in one object" for key in repeated_keys]
    if faults is not None:
        faults += messages
    elif messages:
        raise InputError(messages)
    return document


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML or raise `InputError`."""
    import tomllib

    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # also nested too deeply, or a number too long
        raise InputError(f"not valid TOML ({error})") from None


def format_location(path: Sequence[str | int], document: object = None) -> str:
    """Format a path, with names of items in `document`: ``nodes[3] ('conv1').inputs[0]``."""
    location = ""
    value: Any = document
    for depth, key in enumerate(path):
        if isinstance(key, str):
            location += f".{key}" if location else key
        else:
            location += f"[{key}]"
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            value = None
        # Items of top-level lists have names that users recognize.
        if depth == 1 and isinstance(value, dict) and isinstance(value.get("name"), str):
            location += f" ({quote(value['name'])})" if isinstance(key, int) else ""
    return location


def unknown_key_message(key: object, known_keys: Iterable[str]) -> str:
    """Return a message for an unknown key that suggests a similar known key, or lists all."""
    accepted_keys = tuple(known_keys)
    hint = suggest_names(str(key), accepted_keys) or f"accepted are {', '.join(accepted_keys)}"
    return f"unknown key; {hint}"


def check_writable(path: str | Path) -> None:
    """Raise `InputError` if no file can be written at `path`; an existing file is not changed.

    Creates and removes a temporary file in the folder. Does not check devices and pipes.
    """
    path = _resolve_target(path)
    if not _is_special(path):
        _create_temporary(path).unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file atomically; a device or pipe (``/dev/stdout``) is written directly."""
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        character = quote(error.object[error.start])
        raise InputError(
            f"{path}: cannot be written (the character {character} cannot be encoded)"
        ) from None
    write_bytes(path, content)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write bytes to a file atomically, with the permissions of a new file.

    The target of a link is written; a device or pipe directly. The content is flushed to the disk
    before it replaces that of an existing file.
    """
    path = _resolve_target(path)
    with raise_write_errors(path):
        if _is_special(path):
            path.write_bytes(content)
            return
        draft = _create_temporary(path)
        try:
            with draft.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def raise_write_errors(path: Path, failure: str = "cannot be written") -> Iterator[None]:
    """Convert `OSError` to `InputError` inside; the message has path, `failure` and reason."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: {failure} ({error.strerror or error})") from error


def _resolve_target(path: str | Path) -> Path:
    """Return the path to write to: the target of a link to a file or to none, else `path`."""
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"{path}: expected a file to write, found a folder")
        return path.resolve() if path.is_symlink() and not _is_special(path) else path
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})"
        ) from error


def _is_special(path: Path) -> bool:
    """Return whether `path` exists and is no regular file, but a device, pipe or folder."""
    return path.exists() and not path.is_file()


_MAX_PREFIX: Final = 50
"""Maximum number of characters of a file's name in that of its temporary file."""


def _create_temporary(path: Path) -> Path:
    """Create an empty file in the folder of `path`, with the permissions of a new file."""
    try:
        with suppress(OSError):
            os.lstat(path)  # Raises `ValueError` for a name that no file can have.
        prefix = f".{path.name[:_MAX_PREFIX]}."
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
    except FileNotFoundError:
        if path.parent.is_dir():  # Such as /proc, in which no file can be created.
            msg = f"{path}: the folder {path.parent} cannot be written"
        else:
            msg = f"{path}: the folder {path.parent} does not exist; make it first"
        raise InputError(msg) from None
    except OSError as error:
        raise InputError(
            f"{path}: the folder {path.parent} cannot be written ({error.strerror or error})"
        ) from error
    except ValueError:
        raise InputError(f"{quote(str(path))}: no file can have this name") from None
    os.close(handle)
    umask = os.umask(0)
    os.umask(umask)
    draft = Path(name)
    draft.chmod(0o666 & ~umask)
    return draft
