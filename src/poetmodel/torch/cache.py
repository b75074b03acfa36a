"""A folder of plain values by kind and key, and the keys of graphs and hosts.

The files are JSON, and any number of processes may share them. Each has a line that says what it
is, with the checksum of the rest, and a line of content. It is written in one step. What cannot be
read, or is not what was written, is not there.
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
MOST_FILES: Final = 512
"""Files that are kept; of more those go that were not used for longest."""
LARGEST_BYTES: Final = 2**28
_DIGITS: Final = 40
"""How many digits of a key are in the name of a file."""
_NAMES: Final = "*-" + "[0-9a-f]" * _DIGITS + ".json"
"""Pattern of such names: a folder may hold other files too."""
FOLDER: Final = "POETMODEL_CACHE"
"""The environment variable with the folder to use where none is given; empty for no cache."""

_LOG: Final = logging.getLogger(__name__)


def digest(*parts: Any) -> str:
    """Return a digest of plain values, as JSON has them."""
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
    """Plain values by kind and key; without a folder they go with the object."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._texts: dict[tuple[str, str], bytes] = {}
        """Values without a folder, as a file has them."""

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
        """Return the written object, or None; a damaged one is passed over."""
        if self.folder is None:
            text = self._texts.get((kind, key))
            return None if text is None else json.loads(text)
        path = self._path(kind, key)
        try:
            with path.open("rb") as stream:
                size = min(os.fstat(stream.fileno()).st_size, LARGEST_BYTES)
                first, _, text = stream.read(size).partition(b"\n")
            header = json.loads(first)
            if header != _header(kind, key, text):
                raise ValueError("another file, or a damaged one")  # noqa: TRY301 - as JSON's
            content = json.loads(text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            _LOG.info("%s: passed over (%s)", path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # used just now
        return content

    def write(self, kind: str, key: str, content: Any) -> None:
        """Keep plain values; where they cannot be written, that is logged."""
        text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        if self.folder is None:
            self._texts[kind, key] = text
            return
        path = self._path(kind, key)
        line = json.dumps(_header(kind, key, text)).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_bytes(path, line + b"\n" + text)
            self._prune()
        except (OSError, ValueError) as error:
            _LOG.info("%s: cannot be written (%s)", path, error)

    def _path(self, kind: str, key: str) -> Path:
        return (self.folder or Path()) / f"{kind}-{key[:_DIGITS]}.json"

    def _prune(self) -> None:
        """Remove what was not used for longest, if there is too much."""
        files = list((self.folder or Path()).glob(_NAMES))
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


# -- what a graph and a host are told by -----------------------------------------------------------


class UnknownError(Exception):
    """A graph holds something that has no form of which one can tell that it is the same."""


@cache
def _own_code() -> str:
    """Return a digest of this version of the package's code."""
    sha256 = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def host_key() -> list[Any]:
    """Return all that costs, workspaces and kernels depend on beside the graph."""
    return [
        _own_code(),
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


def operations_form(graph: torch.fx.Graph) -> list[Any]:
    """Return the operations of a graph as plain values.

    Raises
    ------
    UnknownError
        If an argument has no form of which one can tell that it is the same.
    """
    positions = {node: k for k, node in enumerate(graph.nodes)}
    return [
        [node.op, _target(node.target, positions), value_form((node.args, node.kwargs), positions)]
        for node in graph.nodes
        if node.op != "output"
    ]


def tensor_form(tensor: torch.Tensor) -> list[Any]:
    """Return the memory layout of a tensor, as plain values."""
    form = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
    return [str(tensor.dtype), str(tensor.device), *form]


def _target(target: Any, positions: dict[Any, int]) -> Any:
    if isinstance(target, CustomOperation):
        return [type(target).__name__, value_form(target.key_attributes(), positions)]
    if isinstance(target, str | torch._ops.OpOverload):  # noqa: SLF001 - the type of operators
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def value_form(value: Any, positions: dict[Any, int]) -> Any:
    """Return the arguments of a call as plain values; nodes are identified by position.

    Raises
    ------
    UnknownError
        If something has no form of which one can tell that it is the same.
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
        return ["slice", value_form((value.start, value.stop, value.step), positions)]
    if isinstance(value, tuple | list):
        return [value_form(element, positions) for element in value]
    if isinstance(value, dict):
        return {str(key): value_form(element, positions) for key, element in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__name__, value_form(held, positions)]
    raise UnknownError(type(value).__name__)
