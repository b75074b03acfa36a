"""Files of state, as exported programs write and read them: all tensors, one after the other.

``manifest.json`` of the folder says which ones, in which order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.errors import InputError, raised_as
from poetmodel.files import parse_json, read_bytes, read_text, write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STATE_FILE: Final = "state.bin"
"""What the file is called in its folder unless another name is wanted."""
_STORED: Final = {"float32": "<f4", "int32": "<i4", "uint8": "u1", "int8": "i1"}
_MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """One tensor of state of an exported step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """``float32``, ``int32``, ``uint8`` or ``int8``, in the build for the device."""
    home: str
    """``ram``, ``storage``, ``mapped`` or ``flash``; of tiles with several homes all, with +."""

    @property
    def bytes(self) -> int:
        """Size in the build for the device [B]."""
        return math.prod(self.shape) * np.dtype(_STORED[self.dtype]).itemsize


def state_tensors(folder: str | Path, *, is_trained: bool = False) -> tuple[ExportedTensor, ...]:
    """Return what state an exported folder has, in the order of its functions and files.

    Parameters
    ----------
    folder : str or Path
        What was exported.
    is_trained : bool
        Whether its program must change state, and not only hand out gradients.

    Raises
    ------
    InputError
        If the folder has no manifest of an export, or its program does not change state.
    """
    path = Path(folder) / _MANIFEST
    text = read_text(path)
    with raised_as(InputError, str(path)):
        document = parse_json(text, expected="manifest of an export")
        if not isinstance(document, dict) or document.get("format") != "poetmodel-export":
            raise InputError("expected the manifest of a folder that poetmodel export made")
        if is_trained and not document.get("updates", True):
            raise InputError(
                "its program hands out gradients and changes no state, so that it has no file of "
                "state; export it with an optimizer"
            )
        try:
            return tuple(map(_tensor, document["states"]))
        except (KeyError, TypeError, ValueError):
            raise InputError("states: expected name, shape, dtype and home of each") from None


def _tensor(entry: Mapping[str, Any]) -> ExportedTensor:
    if entry["dtype"] not in _STORED:
        raise ValueError(entry["dtype"])
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(shape)
    return ExportedTensor(
        name=str(entry["name"]), shape=shape, dtype=entry["dtype"], home=str(entry["home"])
    )


def state_paths(path: str | Path, folder: str | Path | None) -> tuple[Path, Path]:
    """Return the file of state and the exported folder that a path of either means."""
    path = Path(path)
    if path.is_dir():
        return path / STATE_FILE, path
    return path, path.parent if folder is None else Path(folder)


def read_state(path: Path, tensors: Sequence[ExportedTensor]) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name; reals are doubles where a build for double wrote them.

    Raises
    ------
    InputError
        If the file has another size than these tensors.
    """
    data = read_bytes(path)
    doubles = sum(tensor.bytes for tensor in tensors if tensor.dtype == "float32")
    whole = sum(tensor.bytes for tensor in tensors)
    if len(data) not in {whole, whole + doubles}:
        raise InputError(
            f"{path}: expected {whole:,} B, all state of its folder (or {whole + doubles:,} B of a "
            f"build for double), got {len(data):,} B"
        )
    wide = len(data) != whole
    arrays, at = {}, 0
    for tensor in tensors:
        kind = np.dtype("<f8" if wide and tensor.dtype == "float32" else _STORED[tensor.dtype])
        count = math.prod(tensor.shape)
        arrays[tensor.name] = np.frombuffer(data, kind, count, at).reshape(tensor.shape)
        at += count * kind.itemsize
    return arrays


def write_state(
    path: Path, tensors: Sequence[ExportedTensor], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a file of state: the arrays of these tensors, by name."""
    parts = (arrays[tensor.name].astype(_STORED[tensor.dtype]).tobytes() for tensor in tensors)
    write_bytes(path, b"".join(parts))
