"""Cache of JSON values in a folder or in memory, by kind and key; keys of graphs and hosts.

Several processes may share the files, which have two lines of JSON. The first line has format,
version, kind, key and the checksum of the second line, which is the content. Files are written
atomically. An unreadable or damaged file is ignored, as if it did not exist.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from poetmodel import __version__
from poetmodel.files import processor_line, write_bytes
from poetmodel.torch.step.updates import CustomOperation

FORMAT: Final = "poetmodel-cache"
VERSION: Final = 1
MAX_FILES: Final = 512
"""Maximum number of files; the least recently used ones are removed."""
MAX_FILE_BYTES: Final = 2**28
"""Maximum size of a file; larger ones count as damaged [B]."""
_NAME_DIGITS: Final = 40
"""Number of leading digits of a key in the name of its file."""
_NAME_PATTERN: Final = "*-" + "[0-9a-f]" * _NAME_DIGITS + ".json"
"""Pattern of the names of the cache's files; a folder may contain other files."""
FOLDER_VARIABLE: Final = "POETMODEL_CACHE"
"""Environment variable with the default folder; if it is empty, the default cache is in memory."""

_LOG: Final = logging.getLogger(__name__)


def digest(*values: Any) -> str:
    """Return a SHA-256 digest of JSON values, in hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def default_folder() -> Path | None:
    """Return the folder of `FOLDER_VARIABLE`, or else ``poetmodel`` in the user's cache.

    None if the variable is empty. Raises `RuntimeError` if the user has no home directory.
    """
    folder_setting = os.environ.get(FOLDER_VARIABLE)
    if folder_setting is not None:
        return Path(folder_setting) if folder_setting else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "poetmodel"


class Cache:
    """A cache of JSON values by kind and `digest` key: files, or in memory without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._encoded_values: dict[tuple[str, str], bytes] = {}
        """Values of a cache without a folder, encoded as in a file."""

    @classmethod
    def from_option(cls, option: str | Path | bool) -> Cache:  # noqa: FBT001 - like the option of `compile`
        """Return the cache for `compile`'s option ``cache``; in memory for False or no folder."""
        if option is False:
            return cls(None)
        try:
            return cls(default_folder() if option is True else Path(option))
        except RuntimeError:  # the user has no home directory
            return cls(None)

    def read(self, kind: str, key: str) -> Any:
        """Return the stored value or None, and set its file's time: `_prune` removes the oldest."""
        if self.folder is None:
            encoded = self._encoded_values.get((kind, key))
            return None if encoded is None else json.loads(encoded)
        path = self._path(kind, key)
        try:
            with path.open("rb") as stream:
                size = min(os.fstat(stream.fileno()).st_size, MAX_FILE_BYTES)
                header_line, _, encoded = stream.read(size).partition(b"\n")
            header = json.loads(header_line)
            if header != _make_header(kind, key, encoded):
                raise ValueError("different or damaged file")  # noqa: TRY301 - like json.loads
            content = json.loads(encoded)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            _LOG.info("%s: ignored (%s)", path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # the last use
        return content

    def write(self, kind: str, key: str, content: Any) -> None:
        """Store a JSON value; remove the least recently used files above `MAX_FILES`.

        A failure to write is only logged. Raises `ValueError` for NaN or an infinite number.
        """
        encoded = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        if self.folder is None:
            self._encoded_values[kind, key] = encoded
            return
        path = self._path(kind, key)
        header_line = json.dumps(_make_header(kind, key, encoded)).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_bytes(path, header_line + b"\n" + encoded)
            self._prune()
        except (OSError, ValueError) as error:
            _LOG.info("%s: cannot be written (%s)", path, error)

    def _path(self, kind: str, key: str) -> Path:
        return (self.folder or Path()) / f"{kind}-{key[:_NAME_DIGITS]}.json"

    def _prune(self) -> None:
        """Remove the oldest files of all kinds, by modification time, until `MAX_FILES` remain."""
        files = list((self.folder or Path()).glob(_NAME_PATTERN))
        if len(files) <= MAX_FILES:
            return
        dated_files: list[tuple[float, Path]] = []
        for path in files:
            with suppress(OSError):  # another process has removed it
                dated_files.append((path.stat().st_mtime, path))
        for _, path in sorted(dated_files)[: max(0, len(dated_files) - MAX_FILES)]:
            path.unlink(missing_ok=True)


def _make_header(kind: str, key: str, encoded: bytes) -> dict[str, Any]:
    checksum = hashlib.sha256(encoded).hexdigest()
    return {"format": FORMAT, "version": VERSION, "kind": kind, "key": key, "sha256": checksum}


# -- keys of graphs and hosts ----------------------------------------------------------------------


class NoKeyError(Exception):
    """A graph has no key, because it contains a value that `plain_value` cannot represent."""


@cache
def _code_digest() -> str:
    """Return a digest of the package version and the source files of `poetmodel.torch`."""
    sha256 = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def host_key() -> list[Any]:
    """Return versions, host properties, PyTorch settings and a source digest, for cache keys."""
    return [
        _code_digest(),
        str(torch.__version__),
        platform.machine(),
        platform.node(),
        processor_line("model name", "CPU part"),
        os.cpu_count(),
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]


def plain_operations(graph: torch.fx.Graph) -> list[Any]:
    """Return [FX opcode, target, arguments] of each node but the output, in graph order.

    Raises `NoKeyError` if `plain_value` cannot represent an argument or attribute.
    """
    positions = {node: index for index, node in enumerate(graph.nodes)}
    return [
        [
            node.op,
            _plain_target(node.target, positions),
            plain_value((node.args, node.kwargs), positions),
        ]
        for node in graph.nodes
        if node.op != "output"
    ]


def plain_layout(tensor: torch.Tensor) -> list[Any]:
    """Return type, device, shape, strides and storage offset of a tensor as JSON values."""
    layout = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
    return [str(tensor.dtype), str(tensor.device), *layout]


def _plain_target(target: Any, positions: dict[Any, int]) -> Any:
    """Return the target of an FX node as text; of a `CustomOperation` [class, attributes]."""
    if isinstance(target, CustomOperation):
        return [type(target).__name__, plain_value(target.key_attributes(), positions)]
    if isinstance(target, str | torch._ops.OpOverload):  # noqa: SLF001 - the type of operators
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def plain_value(value: Any, positions: dict[Any, int]) -> Any:
    """Return an argument of a call as JSON values; an FX node becomes ["node", its position].

    Raises `NoKeyError` for a type without a representation.
    """
    if isinstance(value, torch.fx.Node):
        return ["node", positions[value]]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return ["torch", str(value)]
    if isinstance(value, slice):
        return ["slice", plain_value((value.start, value.stop, value.step), positions)]
    if isinstance(value, tuple | list):
        return [plain_value(element, positions) for element in value]
    if isinstance(value, dict):
        return {str(key): plain_value(element, positions) for key, element in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        field_values = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__name__, plain_value(field_values, positions)]
    raise NoKeyError(type(value).__name__)
